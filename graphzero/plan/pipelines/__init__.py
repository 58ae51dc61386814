"""Pipelines of stages: their programs and parts, what these hold on each rank, and what their schedules cost."""
