"""Counts old private terms and docstrings that do not stand by themselves: ``python -m tests.words``."""
