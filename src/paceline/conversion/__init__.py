"""Models made of models: in another format, or at the cost of a larger shape."""
