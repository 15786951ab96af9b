"""Agents that others made, in their own loops, against a model that says what a script says."""
