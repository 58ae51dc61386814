"""The command ``graphzero``: what one asks of a step from a shell, without a training script.

    graphzero calibrate FILE:FACTORY    time the links of the FACTORY's placement; see ``calibrate``
    graphzero opt FILE --passes TEXT    run passes over a printed program; see ``opt``
    graphzero plan FILE:FACTORY         say what a step costs on ranks that are not there; see ``plan``
    graphzero show FILE:FACTORY         the program as text, or as a page; see ``show``
    graphzero trace FILE:FACTORY        measure a step, op by op, beside its plan; see ``trace``
    graphzero tune FILE:FACTORY         rank the layouts of a step that fit a machine; see ``tune``

What a FACTORY is says ``factory``.  Exit status: 0; 1 where the answer is no: a law is broken, a step cannot be
captured; 2 for a wrong command or wrong input, and where the output cannot be written; 130 after Ctrl-C, 141 where
nobody reads the output any more, as shells number these.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

import torch

from graphzero import __version__
from graphzero.cli import calibrate, opt, plan
from graphzero.errors import ConfigError, GraphZeroError, PlacementError
from graphzero.plugins.page import command as show
from graphzero.plugins.profiler import command as trace
from graphzero.plugins.tune import command as tune

COMMANDS = {  # name: (its module, which has add_arguments(parser), in a few words)
    "calibrate": (calibrate, "time the links of a placement"),
    "opt": (opt, "run passes over a printed program"),
    "plan": (plan, "say what a step costs on ranks that are not there"),
    "show": (show, "print the program of a step, or write a page about it"),
    "trace": (trace, "measure a step, op by op"),
    "tune": (tune, "rank the layouts of a step that fit a machine"),
}


STOPPED, UNREAD = 128 + 2, 128 + 13  # by SIGINT, by SIGPIPE
UNWRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of a file that is open


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    options = _parser().parse_args(arguments)
    try:
        status = int(options.run(options) or 0)
        if sys.stdout is not None:  # which may be closed
            sys.stdout.flush()
        return status
    except GraphZeroError as error:
        print(f"graphzero: {type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, PlacementError)) else 1
    except KeyboardInterrupt:
        print("graphzero: stopped", file=sys.stderr)
        return STOPPED
    except OSError as error:
        if error.errno not in UNWRITTEN or error.filename is not None:
            raise
        _drop_output()
        if isinstance(error, BrokenPipeError):
            return UNREAD
        print(f"graphzero: what is printed cannot be written: {error.strerror}", file=sys.stderr)
        return 2


def _drop_output() -> None:
    """What is printed goes nowhere from now on: at its end Python would try once more to write what is left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("graphzero", description="Ask something of a step of training.")
    parser.add_argument("--version", action="version", version=f"graphzero {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, words) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=words))
    return parser
