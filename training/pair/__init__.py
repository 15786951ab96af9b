"""What the model pair is worth for speculation: how well it predicts, how often both agree, how its own text behaves.

``python -m training pair`` runs it. One text follows the files like this: ``command.py`` cuts prompts from the
held-out texts, ``evaluation.py`` takes each through every measurement, ``logit_rows.py`` reads given tokens with both
models and lets the pair write, :mod:`paceline.lab.intervals` turns counts into figures, ``report.py`` shows them.
"""
