"""The algorithm: trees, noise, sampling, verification and the one loop. Imports no engine and no framework."""
