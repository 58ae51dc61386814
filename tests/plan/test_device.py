"""Devices: those that come along, files, and what is said of a file that is none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import graphzero as gz
from graphzero.plan.device import Device, names

PLAIN: dict[str, Any] = {
    "name": "mine", "type": "cuda", "flops": {"f32": 1e12}, "memory": 1e11, "capacity": 10**9, "call": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_a_device_that_comes_along_says_where_its_numbers_are_from_and_reads_back(name: str, tmp_path: Path) -> None:
    found = Device.named(name)
    assert {"bf16", "f32", "f64"} <= set(found.flops) and found.sources
    assert {"inside", "between"} <= set(found.links)
    (tmp_path / "copy.json").write_text(json.dumps(found.to_json()))
    assert Device.named(str(tmp_path / "copy.json")) == found


def test_the_three_data_sheets_are_there() -> None:
    assert {"h100", "a100", "h200"} <= set(names())


def test_an_op_takes_the_longer_of_its_arithmetic_and_its_bytes() -> None:
    one = Device.from_dict(PLAIN | {"reached": {"flops": 0.5, "attention": 0.25, "memory": 0.8}})
    assert one.seconds("mm", "f32", flops=1e12, nbytes=1e9) == 2
    assert one.seconds("attention", "f32", flops=1e12, nbytes=1e9) == 4
    assert one.seconds("add", "f32", flops=0, nbytes=8e10) == pytest.approx(1)
    assert one.seconds("mm", "bf16", flops=1e12, nbytes=0) == 2  # nothing is said of bf16


def test_an_axis_has_its_own_link_or_that_of_the_hosts_it_leads_over() -> None:
    inside, between, own = gz.Link(1e-6, 1e11), gz.Link(1e-5, 1e10), gz.Link(1e-4, 1e9)
    one = Device.from_dict(PLAIN | {"links": {"inside": inside, "between": between, "pp": own}, "host": 4})
    place = gz.placement("cuda", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], names=("dp", "tp", "pp"))
    assert [one.link(place, axis) for axis in place.names] == [between, inside, own]
    assert one.link(gz.placement("cuda", range(8)), "dp") == between
    assert one.link(gz.placement("cuda", range(4)), "dp") == inside
    with pytest.raises(gz.ConfigError, match="nothing of the links along 'dp'"):
        Device.from_dict(PLAIN | {"links": {"tp": own}}).link(place, "dp")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not JSON"),
        ("[1]", "holds list"),
        (json.dumps({"links": {}}), "nothing is said of name, type"),
        (json.dumps(PLAIN | {"type": "tpu"}), "type is 'tpu'"),
        (json.dumps(PLAIN | {"flops": {"bf16": 1e12}}), "nothing is said of f32"),
        (json.dumps(PLAIN | {"flops": 1e12}), "flops is 1000000000000.0"),
        (json.dumps(PLAIN | {"memory": 0}), "memory is 0"),
        (json.dumps(PLAIN | {"reached": {"mm": "most"}}), r"reached\[mm\] is 'most'"),
        (json.dumps(PLAIN | {"call": -1}), "call is -1"),
        (json.dumps(PLAIN | {"links": {"dp": 5}}), "dp is 5"),
        (json.dumps(PLAIN | {"links": {"dp": {"latency": -1, "bandwidth": 1}}}), r"device.json: dp: Link\(latency=-1"),
        (json.dumps(PLAIN | {"links": {"dp": {"latency": 0, "bandwidth": 1, "width": 2}}}), "dict of these two"),
        (json.dumps(PLAIN | {"memory": math.nan}), "NaN is not a number of JSON"),
        (json.dumps(PLAIN | {"memory": 10**400}), "memory is 1000"),
        (json.dumps(PLAIN | {"host": 2.5}), "host is 2.5; give a whole number"),
        (json.dumps(PLAIN | {"overlaps": "no"}), "overlaps is 'no'; give true or false"),
        (json.dumps(PLAIN | {"reachd": {"mm": 0.5}}), "nothing is called 'reachd'; a device has name, type"),
        (json.dumps(PLAIN | {"name": 5}), "name is 5"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_device_says_what_it_lacks(text: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "device.json").write_text(text)
    with pytest.raises(gz.ConfigError, match=word):
        Device.named(str(tmp_path / "device.json"))


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(gz.ConfigError, match="no device 'h1000' and no such file; known are a100, h100, h200"):
        Device.named("h1000")
