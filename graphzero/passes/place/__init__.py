"""Placement of values: from pins to an SBP for every value."""
