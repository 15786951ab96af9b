"""Exit statuses of the command line."""

FAILURE = 1
"""Exit status where something failed that was asked for rightly."""
BAD_INPUT = 2
"""Exit status where what was asked for cannot be done."""
DOES_NOT_PAY = 3
"""Exit status of ``paceline doctor`` where no candidate was found to pay, and of ``paceline distil`` without a gain."""
INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 and the number of SIGINT, as in shells."""
