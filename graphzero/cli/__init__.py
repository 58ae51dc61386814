"""The command ``graphzero``."""

from graphzero.cli.command import main

__all__ = ["main"]
