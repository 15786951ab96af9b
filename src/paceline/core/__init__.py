"""The algorithm: requests, trees, noise, sampling, verification, text. Imports nothing of the package but itself."""
