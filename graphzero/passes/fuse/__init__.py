"""Passes that replace several ops by one op that computes the same."""
