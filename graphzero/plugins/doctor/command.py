"""The command ``graphzero doctor``: one screen that says whether this machine does what programs say."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import graphzero
from graphzero import _compat
from graphzero.cli import factory
from graphzero.plan.device import Device
from graphzero.plugins.calibrate.command import calibrate
from graphzero.plugins.doctor.checks import Finding, check_ranks, check_speed, check_versions, link_text, measure_pace
from graphzero.runtime.world import launch
from graphzero.runtime.world.accelerators import ACCELERATORS
from graphzero.runtime.world.process import ProcessWorld
from graphzero.sbp.link_costs import Link
from graphzero.sbp.placement import Placement, placement

SUMMARY = "check versions, links and collectives of a machine"

EXAMPLES = """examples:
  graphzero doctor                                                this machine, two virtual ranks
  torchrun --nproc-per-node=4 -m graphzero doctor --axes dp=2,tp=2   four ranks, how they talk, and what they send

exit status: 0; 1 if a check does not hold; 2 for a wrong command"""
SHARED_MEMORY, LITTLE = Path("/dev/shm"), 1e9  # bytes
VERSIONS = ("graphzero", "torch", "Python", "CPU", "NCCL")  # which all ranks should have
SIZES, REPEAT = (1 << 14, 1 << 18, 1 << 22), 3  # of collectives that are timed


@dataclass(frozen=True)
class MachineReport:
    """The facts about a machine and its ranks, by axis where it is of one.

    transports: how ranks talk.  links: as measured.  pace: which rank others wait for; "" where nothing travels.
    """

    machine: Mapping[str, str]
    transports: Mapping[str, str]
    links: Mapping[str, Link]
    pace: str
    checks: Sequence[Finding]

    @property
    def hold(self) -> bool:
        return all(check.holds for check in self.checks)

    def __str__(self) -> str:
        lines = [f"{name:<12}{facts}" for name, facts in self.machine.items()]
        lines += [f"along {axis:<6}{about}" for axis, about in self.transports.items()]
        lines += [f"along {axis:<6}{link_text(link)}" for axis, link in self.links.items()]
        if self.pace:
            lines.append(f"{'pace':<12}{self.pace}")
        width = max(len(check.about) for check in self.checks) + 2
        for check in self.checks:
            lines.append(f"{'ok  ' if check.holds else 'FAIL'}  {check.about:<{width}}{check.facts}")
        failed = sum(not check.holds for check in self.checks)
        lines.append(f"{failed} of {len(self.checks)} checks do not hold" if failed else f"all {len(self.checks)} hold")
        if not self.transports:
            lines.append("nothing travelled: run it where ranks are, torchrun --nproc-per-node=N -m graphzero doctor")
        return "\n".join(lines)


def add_arguments(one: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    one.description = (
        "Runs every collective, and a small model at each ZeRO stage, and compares with virtual ranks of one\n"
        "process: results, and what was sent with what was planned. Times each axis. By default all ranks\n"
        "of the job are along one axis, dp."
    )
    one.epilog, one.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    factory.add_rank_arguments(one)
    one.add_argument("--device", default="device.json", metavar="PATH", help="what `graphzero calibrate` wrote, to be "
                     "compared with the measurement; device.json, if it is there")  # fmt: skip
    one.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Do what the command line says; the exit status."""
    calibrated = Device.named(options.device).links if Path(options.device).exists() else {}
    where = _placement(options)
    machine, is_job = describe_machine(where), where.size > 1 and not where.virtual
    checks = [check_versions({what: machine[what] for what in VERSIONS if what in machine})] if is_job else []
    checks += check_ranks(where)
    links = {one.axis: one.link for one in calibrate(where, SIZES, REPEAT)} if is_job else {}
    checks += [check_speed(axis, link, calibrated[axis]) for axis, link in links.items() if axis in calibrated]
    pace = measure_pace(where) if is_job else ""
    machine_report = MachineReport(machine, _transports(where), links, pace, checks)
    if launch.own_rank() == 0:
        print(json.dumps(asdict(machine_report), indent=2) if options.json else machine_report)
    return 0 if machine_report.hold else 1


def _placement(options: argparse.Namespace) -> Placement:
    """The ranks of the job under a launcher, else virtual ones."""
    default = launch.resolve(None)
    where = factory.placement_of(options, default.device_type)
    if launch.has_world():
        return default if where is None else launch.resolve(where)
    where = where or placement(default.device_type, range(2))
    return placement(where.device_type, where.ranks, where.names, virtual=True)


def _transports(place: Placement) -> dict[str, str]:
    """The transport of ranks along each axis of several."""
    if place.virtual:
        return {}
    backend = dist.get_backend()
    world = ProcessWorld(place)
    token = torch.zeros(1, device=world.device)
    for name in place.names:  # which connects them
        world.begin("all_reduce", [token], [token], name).wait()
    several = [name for name, ranks in zip(place.names, place.hierarchy, strict=True) if ranks > 1]
    return {name: world.transports.get(name, f"torch.distributed's {backend}") for name in several}


def describe_machine(place: Placement) -> dict[str, str]:
    """Versions and devices, by what they are of."""
    machine = {
        "graphzero": graphzero.__version__,
        "torch": torch.__version__,
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "CPU": torch.backends.cpu.get_cpu_capability(),
        "cores": f"{len(os.sched_getaffinity(0))} for this process",
        "/dev/shm": _shared_memory_text(),
        "ranks": repr(place),
    }
    for name, accelerator in ACCELERATORS.items():
        if accelerator.is_available:
            own = accelerator.module.get_device_properties(accelerator.module.current_device())
            machine[name] = f"{accelerator.count} x {own.name}, {own.total_memory / 1e9:.1f} GB"
    if torch.cuda.is_available() and dist.is_nccl_available():
        machine["NCCL"] = ".".join(map(str, _compat.nccl_version()))
    return machine


def _shared_memory_text() -> str:
    """Return the room for files in memory, which DataLoader's workers and NCCL use, and graphzero does not."""
    users = "workers of a DataLoader and NCCL on one host use it, graphzero does not"
    if not SHARED_MEMORY.is_dir():
        return f"missing; {users}"
    free = shutil.disk_usage(SHARED_MEMORY).free
    return f"{free / 1e9:.1f} GB free" + (f"; {users}: docker run --shm-size" if free < LITTLE else "")
