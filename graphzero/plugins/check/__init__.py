"""Comparison of a step with plain PyTorch: ``gz.check`` and its parts, in the order of a check.

``initial_state`` collects what one step reads, as whole copies; ``eager`` runs the user's build and optimizers on them;
``stage_values`` runs the program after every pass; ``compare`` says what is beyond rounding; ``report`` writes it down.
"""

from graphzero.plugins.check.checking import check
from graphzero.plugins.check.report import Report, Stage

__all__ = ["Report", "Stage", "check"]
