"""Choices of the values and gathers that a step holds for backward, and of those that it makes again, within limits."""
