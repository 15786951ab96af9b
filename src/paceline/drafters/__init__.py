"""Drafters: cheap sources of tokens, one contract (``base``)."""
