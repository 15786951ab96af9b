"""Models whose layers lie on other machines, measured over workers that are so far away, and that are lost."""
