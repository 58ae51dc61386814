"""The command as a program: its exit status where it is stopped, or cannot write, and the files that it writes."""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path

import pytest
import torch

import graphzero as gz
from graphzero.cli import command, main
from graphzero.cli.output import check_output, write_output
from graphzero.plugins.opt import command as opt


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "graphzero: stopped"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "what is printed cannot be written: No space left"),
    ],
)
def test_what_ends_a_command_is_told_by_its_status_and_no_traceback(
    error: BaseException, status: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(options: argparse.Namespace) -> None:
        raise error

    monkeypatch.setattr(opt, "run", run)
    monkeypatch.setattr(command, "_drop_output", lambda: None)  # which is this process's, not the test's
    assert main(["opt"]) == status
    assert words in capsys.readouterr().err


def test_an_error_of_a_file_that_nobody_foresaw_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(options: argparse.Namespace) -> None:
        Path("/nowhere/to/be/found").read_bytes()

    monkeypatch.setattr(opt, "run", run)
    with pytest.raises(FileNotFoundError):
        main(["opt"])


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "page.html"
    write_output("--html", str(file), "first")
    write_output("--html", str(file), "second")
    assert file.read_text() == "second"

    def full(self: Path, *args: object, **kwargs: object) -> None:
        self.write_bytes(b"thi")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(gz.ConfigError, match="--html .*page.html cannot be written: No space left"):
        write_output("--html", str(file), "third")
    assert (file.read_text(), os.listdir(tmp_path)) == ("second", ["page.html"])


def test_where_nothing_can_be_written_is_said_before_anything_runs(tmp_path: Path) -> None:
    check_output("--html", str(tmp_path / "page.html"))
    check_output("--html", os.devnull)
    for path, words in ((tmp_path / "no" / "page.html", "there is no folder"), (tmp_path, "it is a folder")):
        with pytest.raises(gz.ConfigError, match=words):
            check_output("--html", str(path))


def test_the_version_is_that_of_the_package_and_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"graphzero {gz.__version__}, torch {torch.__version__}\n"
