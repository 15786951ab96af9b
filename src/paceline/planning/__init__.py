"""Planning: what to draft, from whom, and what to verify."""
