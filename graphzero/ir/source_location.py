"""Source locations of values in the user's code: "file:line in function"."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from types import CodeType, FrameType, ModuleType

import torch

from graphzero import _compat

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = ("site-packages", "dist-packages")
_known: dict[str, str | None] = {}  # by file: code of the same text and line in two files is equal


def _file_of(code: CodeType) -> str | None:
    """The name of the user's file, or None for code of torch, graphzero and Python itself."""
    file = code.co_filename
    if file not in _known:
        short = _from_here(file)
        shown = file if short.startswith(os.pardir) else short
        _known[file] = None if _is_ours(file) else _cell(file) or shown
    return _known[file]


def _from_here(file: str) -> str:
    """A path as it is from the working folder; as it is where that folder is gone."""
    try:
        return os.path.relpath(file) if os.path.isabs(file) else file
    except OSError:
        return file


def _cell(file: str) -> str:
    """IPython's name of the notebook cell that a file holds, "Cell In[3]"; "" for other files."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
    return " ".join(named) if named else ""


def is_library(module: ModuleType | None) -> bool:
    """Return whether a module is torch's, graphzero's, or Python's own."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return module is None or module.__name__ in sys.builtin_module_names
    return _is_ours(file)


def is_project(name: str | None) -> bool:
    """Return whether a module of this name is the user's own: no library, installed or not."""
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None) or ""
    return module is not None and not is_library(module) and not any(package in file for package in _PACKAGES)


def _is_ours(file: str) -> bool:
    library = file.startswith(_STDLIB) and not any(name in file for name in _PACKAGES)
    return library or file.startswith((_TORCH, _HERE, "<frozen"))


def user_frames(limit: int = 1, until: CodeType | None = None) -> list[str]:
    """The innermost frames of the running stack that are neither torch's nor graphzero's, innermost first.

    Args:
        limit: how many at most.
        until: code object of the outermost function of interest.
    """
    frames: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < limit:
        file = _file_of(frame.f_code)
        if file is not None:
            frames.append(f"{file}:{frame.f_lineno} in {frame.f_code.co_name}")
        if frame.f_code is until:
            break
        frame = frame.f_back
    return frames


def user_frame() -> str:
    """The innermost frame of the user, or ""."""
    return "".join(user_frames(limit=1))


def running_module(modules: Mapping[int, str], until: CodeType | None) -> str:
    """The path of the innermost module of the running stack that is among ``modules``, by id; "" for none.

    until: code object of the outermost function of interest.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not until:
        if frame.f_code is _compat.MODULE_CALL and (path := modules.get(id(frame.f_locals["self"]))) is not None:
            return path
        frame = frame.f_back
    return ""


def line_of(code: CodeType, number: int) -> str:
    """ "file:line in function" for a line of user code, "" for other code."""
    file = _file_of(code)
    return f"{file}:{number} in {code.co_name}" if file is not None else ""
