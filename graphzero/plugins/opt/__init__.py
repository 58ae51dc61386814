"""``graphzero opt``: passes over a printed program."""
