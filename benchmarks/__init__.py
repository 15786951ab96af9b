"""The measurements behind the figures in the documentation: `python -m benchmarks --help`."""
