"""Where a draft model and its target part: at which tokens of a text, how far, and why."""
