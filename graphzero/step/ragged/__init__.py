"""Batches of many shapes in few programs: how a call is padded, and its step kept apart from padding."""
