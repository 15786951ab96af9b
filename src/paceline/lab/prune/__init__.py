"""Cutting a draft model smaller: fewer tokens, fewer layers, narrower layers, fewer bits; and measuring what it costs.

::

    MODEL ──> what is kept: tokens (by text), layers (each measured without), blocks of units (by weights)
                  │
                  v
              one file, written once, quantised if asked, loaded and read ──> OUT ──> passes timed, drafts measured
"""
