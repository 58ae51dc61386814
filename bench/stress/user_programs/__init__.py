"""Small training programs in the manner of public bug reports; importing this package registers all of them."""

from stress.user_programs import (  # noqa: F401
    gradients,
    layers,
    losses,
    mid_run,
    numbers,
    optimizers,
    state,
    tensors,
)
from stress.user_programs.program import PROGRAMS, Program, Source

__all__ = ["PROGRAMS", "Program", "Source"]
