"""A target and a draft model: how their tokens relate, how often they agree, and what drafting gains.

::

    measures.py   counts and distributions into figures with their uncertainty
    reading.py    both models read a text, row by row
    alignment.py  both tokenizers cut a text
"""
