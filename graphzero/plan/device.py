"""A device's speeds, as numbers in a file, from which seconds of a step are modelled.

An op takes the longer of its arithmetic at the peak and its bytes at the peak, divided by the share of the peak that
such an op reaches (the roofline model: Williams, Waterman and Patterson, 2009).  A file says where its numbers are
from; ``graphzero calibrate`` writes one of measured numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graphzero.errors import ConfigError
from graphzero.runtime.json_file import read_json
from graphzero.runtime.world.device_memory import SHARE
from graphzero.sbp.link_costs import Link, is_finite, link_of
from graphzero.sbp.placement import DEVICE_TYPES, Placement

FOLDER = Path(__file__).parent / "devices"
INSIDE, BETWEEN = "inside", "between"
HOST_MEMORY = "host memory"
FLOPS, MEMORY = "flops", "memory"  # what bounds an op, and the shares of ops that have none of their own
BESIDE = ("placement", "torch", "measured")  # what ``graphzero calibrate`` notes in the same file
OF_16_BITS = ("bf16", "f16")


@dataclass(frozen=True)
class Device:
    """One rank's part of a machine.

    name: for messages.  type: "cuda" or "cpu", for which programs are made.
    flops: operations a second at the peak, by dtype as programs write it (f32, bf16); f32 is there.
    memory: bytes a second at the peak.  capacity: bytes of memory.  call: seconds that it takes to start an op.
    links: by the name of an axis; "inside" and "between" hosts, for all others, and "inside 2" for axes along which
    so many ranks meet, or fewer; "host memory" for copies between a device and its host, of which both directions run
    at a time.  host: ranks of one host.
    reached: share of the peak by op (mm, attention); "flops" and "memory" for ops that are bound by these.
    runs_ahead: whether the host starts ops while others run, as of a GPU.  overlaps: whether transfers run during
    compute; otherwise a rank that waits for one makes it itself.  step: seconds around the ops of a step,
    with those for which ranks wait for late ones.
    sources: of these numbers, in words.
    """

    name: str
    type: str
    flops: Mapping[str, float]
    memory: float
    capacity: int
    call: float
    links: Mapping[str, Link] = field(default_factory=dict)
    host: int = 1
    reached: Mapping[str, float] = field(default_factory=dict)
    runs_ahead: bool = False
    overlaps: bool = True
    step: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        what = f"device {self.name}"
        if not isinstance(self.name, str):
            raise ConfigError(f"{what}: its name is {self.name!r}; give a text")
        if self.type not in DEVICE_TYPES:
            raise ConfigError(f"{what}: its type is {self.type!r}; write one of {', '.join(DEVICE_TYPES)}")
        if "f32" not in self.flops:
            raise ConfigError(f"{what}: nothing is said of f32; give flops by dtype, such as {{'f32': 6.7e13}}")
        numbers = {f"flops[{dtype}]": rate for dtype, rate in self.flops.items()}
        numbers |= {f"reached[{op}]": share for op, share in self.reached.items()}
        for name, number in {**numbers, "memory": self.memory}.items():
            if not is_finite(number) or number <= 0:
                raise ConfigError(f"{what}: {name} is {number!r}; give a number above 0")
        for name, number in {"capacity": self.capacity, "host": self.host}.items():
            if type(number) is not int or number <= 0 or not is_finite(number):
                raise ConfigError(f"{what}: {name} is {number!r}; give a whole number above 0")
        for name, number in {"call": self.call, "step": self.step}.items():
            if not is_finite(number) or number < 0:
                raise ConfigError(f"{what}: {name} is {number!r}; give seconds, 0 or more")
        for name, answer in {"runs_ahead": self.runs_ahead, "overlaps": self.overlaps}.items():
            if not isinstance(answer, bool):
                raise ConfigError(f"{what}: {name} is {answer!r}; give true or false")

    @property
    def usable(self) -> int:
        """Bytes that a plan may peak at: ``SHARE`` of the capacity, as for a memory budget of "auto"."""
        return int(SHARE * self.capacity)

    @classmethod
    def named(cls, name: str) -> Device:
        """The device of a name in ``names()``, or of a file's path.  Raises ConfigError for neither."""
        known = FOLDER / f"{name}.json"
        if name in names():
            return cls.from_file(known)
        if Path(name).is_file():
            return cls.from_file(name)
        raise ConfigError(
            f"there is no device {name!r} and no such file; known are {', '.join(names())}, and `graphzero calibrate "
            "FILE:FACTORY --output device.json` measures this machine"
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Device:
        """The device in a file of JSON, as ``to_json`` writes it.  Raises ConfigError for what is none."""
        what = f"device {os.fspath(path)}"
        return cls.from_dict(read_json(path, what, "`graphzero calibrate` writes such a file"), what)

    @classmethod
    def from_dict(cls, numbers: Any, what: str = "device") -> Device:
        """Of plain dicts and numbers.  Raises ConfigError for what is missing or unknown, and says it."""
        if not isinstance(numbers, Mapping):
            raise ConfigError(f"{what}: it holds {type(numbers).__name__}, not a device; see graphzero/plan/devices")
        fields = {name: numbers[name] for name in cls.__dataclass_fields__ if name in numbers}
        needed = ("name", "type", "flops", "memory", "capacity", "call")
        missing = [name for name in needed if name not in fields]
        if missing:
            raise ConfigError(
                f"{what}: nothing is said of {', '.join(missing)}; `graphzero calibrate` writes such a file"
            )
        unknown = [name for name in numbers if name not in fields and name not in BESIDE]
        if unknown:
            raise ConfigError(
                f"{what}: nothing is called {unknown[0]!r}; a device has {', '.join(cls.__dataclass_fields__)}"
            )
        maps = [name for name in ("flops", "links", "reached", "sources") if name in fields]
        for name in maps:
            if not isinstance(fields[name], Mapping):
                raise ConfigError(f"{what}: {name} is {fields[name]!r}; give an object, {{name: ...}}")
        fields["links"] = {name: link_of(given, f"{what}: {name}") for name, given in fields.get("links", {}).items()}
        try:
            return cls(**fields)
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """As plain dicts and numbers, for ``json.dumps``; ``from_dict`` reads them."""
        return asdict(self)

    # ---- prices

    def flops_of(self, dtype: str) -> float:
        """Operations a second at the peak for a dtype, that of the nearest one known where nothing is said of it."""
        near = (dtype, *(OF_16_BITS if dtype in OF_16_BITS else ()), "f32")
        return next(self.flops[name] for name in near if name in self.flops)

    def seconds(self, op: str, dtype: str, flops: float, nbytes: float) -> float:
        """Seconds of the work of an op, without its start."""
        bounds = flops / self.flops_of(dtype), nbytes / self.memory
        bound = FLOPS if bounds[0] > bounds[1] else MEMORY
        return max(bounds) / self.reached.get(op, self.reached.get(bound, 1.0))

    def link(self, placement: Placement, axis: str) -> Link:
        """The link of an axis: its own, or that of the widest way that it leads over, for as many ranks.

        Raises ConfigError where the device says nothing of it.
        """
        way, ranks = self.way(placement, axis), placement.hierarchy[placement.axis(axis)]
        narrow = {n: link for name, link in self.links.items() if (n := meeting(name, way)) >= ranks}
        price = (
            self.links.get(axis)
            or (narrow[min(narrow)] if narrow else None)
            or self.links.get(way)
            or self.links.get(BETWEEN)
            or self.links.get(INSIDE)
        )
        if price is None:
            raise ConfigError(
                f"device {self.name} says nothing of the links along {axis!r}, of {', '.join(self.links) or 'none'} "
                f'alone; add "{axis}", or "{INSIDE}" and "{BETWEEN}" hosts, to its "links"'
            )
        return price

    def host_link(self) -> Link:
        """The link to and from host memory.  Raises ConfigError where the device does not describe it."""
        if HOST_MEMORY not in self.links:
            raise ConfigError(
                f"device {self.name} says nothing of the link to host memory, where this step keeps values; add "
                f'"{HOST_MEMORY}": {{"latency": seconds, "bandwidth": bytes a second in each direction}} to its "links"'
            )
        return self.links[HOST_MEMORY]

    def host_copy_seconds(self, nbytes: float) -> float:
        """The seconds of a copy to or from host memory, which a CPU makes itself."""
        if self.type == "cpu":
            return 2 * nbytes / self.memory
        link = self.host_link()
        return link.latency + nbytes / link.bandwidth

    def way(self, placement: Placement, axis: str) -> str:
        """Whether ranks that meet along an axis are "inside" one host, or "between" several; they fill host by host."""
        lines = placement.ranks.swapaxes(placement.axis(axis), -1).reshape(
            -1, placement.hierarchy[placement.axis(axis)]
        )
        return INSIDE if ((lines // self.host) == (lines[:, :1] // self.host)).all() else BETWEEN


def meeting(name: str, way: str) -> int:
    """The number of ranks that share a link of this name, "inside 2"; 0 if it is of another way, or has no number."""
    words = name.split()
    return int(words[1]) if len(words) == 2 and words[0] == way and words[1].isdecimal() else 0


def is_way(name: str) -> bool:
    """Whether a link is called by its way, and not by an axis."""
    return name in (INSIDE, BETWEEN) or any(meeting(name, way) for way in (INSIDE, BETWEEN))


def names() -> list[str]:
    """The devices that come with graphzero."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))
