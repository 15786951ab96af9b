"""Decoding: rounds over all active requests, and who may ask for them."""
