"""Padding of ragged shapes: few programs serve batches of many shapes, and each computes what it would unpadded."""
