"""Recorded drafts, and what a policy would have made of them."""
