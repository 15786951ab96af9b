"""Training a draft model to agree with its target.

::

    prompts ──answers.py──> the target's answers ──rows.py──> its distributions ──training.py──> a trained draft
       │                                                      objective.py is what is minimised
       └──> held out ──────────────────────────────────────── verdict.py: before and after, and tokens/s

:mod:`~paceline.lab.distil.steps` makes one after the other, each of which goes on where it stood. torch is needed from
the objective on.
"""
