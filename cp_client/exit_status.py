"""Exit statuses of the command line."""

DONE = 0
FAILED = 1
"""Something went wrong while running."""
REFUSED = 2
"""The input or the configuration is refused; one sentence on stderr says why."""
