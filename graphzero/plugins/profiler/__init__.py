"""Traces of steps: begin and end of every op and collective, next to the plan.

``recorder`` notes when lines of a program begin, ``tracing`` brings the ranks' clocks together and makes a ``Trace`` of
that, ``chrome`` a file that Perfetto reads, ``compare`` a list of what is not as planned, and the report.
"""

from graphzero.plugins.profiler.tracing import Trace, trace

__all__ = ["Trace", "trace"]
