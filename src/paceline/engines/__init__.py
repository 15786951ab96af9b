"""Engines: one contract (``base``), three implementations, loaded only when asked for by name."""
