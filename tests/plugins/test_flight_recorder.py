"""What NCCL's flight recorder has is compared with what a program launches; the dump is of the recorder's form."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.flight_recorder.components import types

from graphzero.errors import GraphZeroError
from graphzero.ir.streams.launches import list_rank_launches
from graphzero.ir.text.parser import parse
from graphzero.plugins.doctor.flight_recorder import KINDS, compare_launches, last_record, list_recorded

PROGRAM = """
graph step(dp=2, tp=2) local
  v = param() : f32[8]  (S(0), B)
  h = batch() : f32[6]  (B, P)
forward:
  l = launch('bucket_all_gather', 0, [v], [0], 'dp') : (f32[8]  (B, B))
  a = wait(l) : (f32[8]  (B, B))
  b = a[0] : f32[8]  (B, B)
  m = launch('bucket_all_reduce', 1, [h], 'tp', 'sum') : (f32[6]  (B, B))
  c = wait(m) : (f32[6]  (B, B))
  d = c[0] : f32[6]  (B, B)
  return b, d
"""
PLANNED = list_rank_launches(parse(PROGRAM), 0)


def entry(number: int, group: str, name: str, sent: int, received: int) -> dict[str, Any]:
    return {
        "record_id": number, "pg_id": int(group), "process_group": (group, "undefined"), "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": f"nccl:{name}", "time_created_ns": 1, "frames": [],
        "input_sizes": [[sent]], "input_dtypes": ["Float"], "output_sizes": [[received]], "output_dtypes": ["Float"],
        "state": "completed", "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "retired": True,
        "timeout_ms": 600000, "is_p2p": False,
    }  # fmt: skip


def dump(*entries: dict[str, Any]) -> dict[str, Any]:
    config = {"1": "[0, 2]", "2": "[0, 1]", "3": "[0, 1, 2, 3]"}
    groups = {name: {"name": name, "desc": "undefined", "ranks": ranks} for name, ranks in config.items()}
    return {"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": list(entries)}


EARLIER = entry(0, "3", "all_reduce", 1, 1)
RECORDED = (entry(1, "1", "_all_gather_base", 4, 8), entry(2, "2", "all_reduce", 6, 6))


def test_the_form_is_that_which_torchs_own_reader_takes() -> None:
    memberships = {"1": {0, 2}, "2": {0, 1}, "3": {0, 1, 2, 3}}
    for one in (EARLIER, *RECORDED):
        assert types.Op(one, memberships, one["process_group"][0]).type in KINDS
    later = {"all_gather_single", "reduce_scatter_single"} if not hasattr(dist, "all_gather_single") else set()
    assert KINDS.keys() - later <= types.COLLECTIVES | {"all_to_all", "all_to_all_single"}


def test_what_was_launched_as_planned_is_found_after_an_earlier_record_in_any_order_of_entries() -> None:
    after = last_record(dump(EARLIER))
    recorded = list_recorded(dump(*reversed(RECORDED), EARLIER, entry(3, "3", "barrier", 1, 1)), after)
    assert compare_launches(PLANNED, recorded) == "2 launches recorded as planned"


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (RECORDED[:1], r"launch 1 of 'm' was planned as all_reduce among ranks \[0, 1\], 6 to 6.*recorded is nothing"),
        ((RECORDED[1], RECORDED[0]), "recorded is all_reduce among ranks"),
        ((RECORDED[0], entry(2, "3", "all_reduce", 6, 6)), r"recorded is all_reduce among ranks \[0, 1, 2, 3\]"),
        ((RECORDED[0], entry(2, "2", "all_reduce", 5, 5)), "recorded is all_reduce among .*5 to 5 elements"),
        ((RECORDED[0], entry(2, "2", "all_to_all", 6, 6)), "recorded is all_to_all among"),
        ((*RECORDED, entry(3, "3", "all_reduce", 1, 1)), "1 launches more than planned, first all_reduce among ranks"),
    ],
)
def test_what_differs_is_said_with_both(entries: tuple[dict[str, Any], ...], problem: str) -> None:
    numbered = (one | {"record_id": number} for number, one in enumerate(entries, 1))
    with pytest.raises(GraphZeroError, match=problem):
        compare_launches(PLANNED, list_recorded(dump(*numbered)))
