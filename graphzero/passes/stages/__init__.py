"""Pipeline stages: which stage computes each value, and the parts of a program that a schedule runs."""
