"""Two hosts on one machine: network namespaces, joined by a pair of virtual cables, each with processes of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = "10.213.77.1", "10.213.77.2"


def allowed() -> bool:
    """Whether this machine lets this user make them."""
    tools = all(shutil.which(tool) for tool in ("ip", "unshare"))
    return (
        tools and subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True).returncode == 0
    )


@contextmanager
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two hosts; they are gone at the end, with all that runs there."""
    names = f"gz{os.getpid()}a", f"gz{os.getpid()}b"
    cables = tuple(f"c{name}" for name in names)
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", cable, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def cut(host: str) -> None:
    """Take the cable out: nothing is said to anybody."""
    _ip("-n", host, "link", "set", f"c{host}", "down")


def run(host: str, output: Path, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command on a host; all that it starts there ends with what is returned."""
    inside = ["ip", "netns", "exec", host, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with output.open("wb") as told:
        return subprocess.Popen(
            [*inside, *command], stdout=told, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )


def start(host: str, which: int, output: Path, script: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start the rank of one host by ``examples/hosts.sh``; all there ends with what is returned.

    The first host may go on alone, seconds after it has missed the other.
    """
    meet = f"is_host={int(which == 0)},last_call_timeout=6,keep_alive_interval=1"  # its name leads nowhere in there
    environment = {
        "FIRST": ADDRESSES[0], "HOSTS": "1:2", "LOCAL": ADDRESSES[which], "LINK": f"c{host}",
        "MEET": meet, "TORCHRUN": str(Path(sys.executable).with_name("torchrun")),
    }  # fmt: skip
    return run(host, output, ["bash", str(script.with_name("hosts.sh")), str(script), *options], environment)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
