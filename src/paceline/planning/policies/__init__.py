"""Simple policies: lengths set by hand, and what others do, to compare with."""
