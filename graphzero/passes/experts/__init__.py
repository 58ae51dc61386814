"""Mixtures of experts: experts over ranks, and the tokens of each rank sorted by themselves."""
