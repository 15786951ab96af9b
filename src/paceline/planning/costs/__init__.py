"""What rounds cost on a machine: measured, read, and kept."""
