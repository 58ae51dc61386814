"""The pytest plugin: ``--accept`` rewrites the texts that ``graphzero.testing.assert_graph`` expects."""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("graphzero")
    group.addoption(
        "--accept", action="store_true", help="take the graphs that assert_graph finds as expected from now on"
    )


def pytest_configure(config: Any) -> None:
    if config.getoption("--accept"):
        from graphzero.testing import accept

        accept.enable(True)


def pytest_sessionfinish(session: Any) -> None:
    if session.config.getoption("--accept"):
        from graphzero.testing import accept

        for path in accept.write():
            print(f"\naccepted: {path}")
