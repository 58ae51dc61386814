"""Micro-batches: the batch of a step in parts that run one after the other."""
