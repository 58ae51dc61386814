"""The idea of graphzero in 500 lines: docs/core.md shows them with what they print."""
