"""Exit statuses of the command line."""

FAILURE = 1
BAD_INPUT = 2
INTERRUPTED = 130
