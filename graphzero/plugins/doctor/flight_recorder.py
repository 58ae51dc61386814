"""Compares the launches in torch's flight recorder with those of a program.

The recorder keeps the last collectives of each process group of NCCL, where ``TORCH_NCCL_TRACE_BUFFER_SIZE`` is set
when the groups are made.  ``compare_launches`` is a function of its dump alone.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from graphzero import _compat
from graphzero.errors import GraphZeroError
from graphzero.ir.streams.launches import RankLaunch

KINDS = {  # names of torch 2.11 to 2.15
    "_all_gather_base": "all_gather", "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    "all_reduce": "all_reduce", "all_to_all": "all_to_all", "all_to_all_single": "all_to_all",
}  # fmt: skip
Recorded = tuple[str, tuple[int, ...], int, int]  # kind, ranks, elements sent, elements received


def read_recorder() -> Mapping[str, Any] | None:
    """The dump of this process; None where torch has no recorder, or it keeps nothing."""
    dump = _compat.dump_nccl_trace()
    return None if dump is None else pickle.loads(dump)


def list_recorded(dump: Mapping[str, Any], after: int = -1) -> list[Recorded]:
    """The collectives of a dump in the order of their launch, those with a larger ``record_id`` than ``after``.

    Messages between two ranks, barriers and what torch itself launches are left out.
    """
    ranks_of = {name: tuple(_ranks(group["ranks"])) for name, group in dump["pg_config"].items()}
    recorded = []
    for entry in sorted(dump["entries"], key=lambda entry: int(entry["record_id"])):
        kind = KINDS.get(entry["profiling_name"].partition(":")[2])
        if kind is not None and entry["record_id"] > after:
            sent, received = (sum(map(prod, entry[key])) for key in ("input_sizes", "output_sizes"))
            recorded.append((kind, ranks_of[entry["process_group"][0]], sent, received))
    return recorded


def last_record(dump: Mapping[str, Any]) -> int:
    """The number of the last entry, -1 where there is none."""
    return max((int(entry["record_id"]) for entry in dump["entries"]), default=-1)


def compare_launches(planned: Sequence[RankLaunch], recorded: Sequence[Recorded]) -> str:
    """A sentence; raises GraphZeroError for the first launch that is not as planned, with both."""
    for number, launch in enumerate(planned):
        seen = recorded[number] if number < len(recorded) else None
        if seen is None or seen != tuple(launch[:4]):
            what = "nothing" if seen is None else str(RankLaunch(*seen, launch.node))
            raise GraphZeroError(f"launch {number} of '{launch.node.name}' was planned as {launch}; recorded is {what}")
    if len(recorded) > len(planned):
        kind, ranks, *_ = recorded[len(planned)]
        more = len(recorded) - len(planned)
        raise GraphZeroError(f"{more} launches more than planned, first {kind} among ranks {[*ranks]}")
    return f"{len(planned)} launches recorded as planned"


def _ranks(ranks: Any) -> list[int]:
    """A dump has the ranks of a group as text."""
    return list(json.loads(ranks) if isinstance(ranks, str) else ranks)
