"""The command ``graphzero``: questions about a step from a shell, without a training script.

Its commands are plug-ins, see ``graphzero.extensions``; ``factory`` and ``output`` are for several of them.  Exit
status: 0; 1 where the answer is no: a law is broken, a step cannot be captured; 2 for a wrong command or wrong input,
and where the output cannot be written; 130 after Ctrl-C, 141 where the output is no longer read, as shells number
these.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from graphzero import __version__
from graphzero.errors import ConfigError, GraphZeroError, PlacementError, shorten_repr
from graphzero.extensions import COMMANDS, Extension, extensions


class Command(Protocol):
    """A command: a module, or any object that has these.  run: returns the exit status, None for 0."""

    @property
    def SUMMARY(self) -> str: ...
    @property
    def add_arguments(self) -> Callable[[argparse.ArgumentParser], None]: ...
    @property
    def run(self) -> Callable[[argparse.Namespace], int | None]: ...


STOPPED, UNREAD = 128 + 2, 128 + 13  # by SIGINT, by SIGPIPE
UNWRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of a file that is open


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parser(arguments).parse_args(arguments)
        status = int(options.run_command(options) or 0)
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
        if not _is_of_output(error):
            raise
        _drop_output()
        if isinstance(error, BrokenPipeError):
            return UNREAD
        print(f"graphzero: what is printed cannot be written: {error.strerror}", file=sys.stderr)
        return 2


def _is_of_output(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in UNWRITTEN and error.filename is None


def _drop_output() -> None:
    """Discard further output: at its end Python would try once more to write the rest."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser.  Only the plug-in is imported whose command is asked for; all of them for --help."""
    parser = argparse.ArgumentParser("graphzero", description="Ask something of a step of training.")
    parser.add_argument("--version", action="version", version=f"graphzero {__version__}, torch {torch.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    plugins = extensions(COMMANDS)
    for name in sorted(plugins):
        if not {*arguments[:1]} & plugins.keys() - {name}:
            command = _plugin_command(plugins[name])
            subparser = subparsers.add_parser(name, help=command.SUMMARY.replace("%", "%%"))
            with plugins[name].name_errors():
                command.add_arguments(subparser)
            subparser.set_defaults(run_command=partial(_run_command, plugins[name], command))
    return parser


def _run_command(plugin: Extension, command: Command, options: argparse.Namespace) -> int | None:
    with plugin.name_errors(unless=_is_of_output):
        status = command.run(options)
    if status is not None and not isinstance(status, int):
        raise plugin.refusal(f"ended with the status {shorten_repr(status)}; run returns a number, or None for 0")
    return status


def _plugin_command(plugin: Extension) -> Command:
    command = plugin.load()
    missing = [name for name in ("SUMMARY", "add_arguments", "run") if not hasattr(command, name)]
    if missing:
        raise plugin.refusal(f"is not a command: it has no {', '.join(missing)}")
    if isinstance(command, type):
        raise plugin.refusal("is not a command but a class of some: give an object of it")
    if not isinstance(command.SUMMARY, str) or not callable(command.add_arguments) or not callable(command.run):
        raise plugin.refusal("is not a command: SUMMARY is a text, add_arguments and run are functions")
    return command  # type: ignore[no-any-return]
