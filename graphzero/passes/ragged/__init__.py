"""Ragged dims: a step that was captured for padded sizes becomes one that computes what the true sizes would give."""
