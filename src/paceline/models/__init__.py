"""The model pair that travels with the package."""
