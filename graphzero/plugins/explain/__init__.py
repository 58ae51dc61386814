"""``gz.explain``: why a value has the SBP it has."""

from graphzero.plugins.explain.explanation import Explanation, SbpChoice, explain

__all__ = ["Explanation", "SbpChoice", "explain"]
