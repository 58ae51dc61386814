"""Ops of which a rule of splits says too little: they read places by number, or a dim that padding must not enter.

Each function speaks for the dims that it knows of and leaves the others to ``by_rule``.  ``TABLE`` lists them, and
importing this fills it: there is one file for each kind of such ops.
"""

from __future__ import annotations

from graphzero.plugins.ragged import indices, parts, whole_dims
from graphzero.plugins.ragged.table import TABLE

__all__ = ["TABLE", "indices", "parts", "whole_dims"]
