"""Small training programs in the manner of public bug reports; importing this package registers all of them."""

from stress.user_programs import losses, modules, tensors  # noqa: F401
from stress.user_programs.program import PROGRAMS, Program, Source

__all__ = ["PROGRAMS", "Program", "Source"]
