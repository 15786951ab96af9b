"""Weights that are read from the disk while they are used: models larger than memory.

A pass goes through a model's layers in their order, so what it needs next is known. Some layers stay in memory; the
others take turns in a ring of slots, which a thread fills just ahead of the pass::

    layers        0   1   2   3   4   5   6   7          (2 and 5 stay)
                  │   │       │   │       │   │
    slots         a   b       a   b       a   b   a   b  (0 and 1 of the next pass)

    layout.py     which bytes of the files each layer is, and which layers stay
    disk.py       reading them past the page cache
    ring.py       slots, the thread that fills them, and who waits for whom

Nothing here knows an engine: it tells the ring what it is about to use and what it is done with.
"""
