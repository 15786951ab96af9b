"""The planner's gate: whether a change of it costs anything, anywhere, by replay of texts that stay as they are.

::

    revision ──> environments.py: compiled, in a folder of its own ─┐
                                                                    ├──> worker.py, a process ─┐
    corpus.py: recordings, costs ──> scenes.py: how they are met ───┘                          ├──> verdict.py
    the other revision, or the working tree ───────── the same ────────────────────────────────┘

Each side replays with the code and the corpus of its own revision, so either may change; what both have is compared.
"""
