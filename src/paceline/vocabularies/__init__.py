"""How the vocabularies of two models relate."""
