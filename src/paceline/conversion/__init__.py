"""Models made of models: in another format, at the cost of a larger shape, or smaller as a draft of their own."""
