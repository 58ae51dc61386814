"""Arguments of a call: names, leaves and their tree, however they are given."""

import pytest
import torch

import graphzero as gz
from graphzero.capture.objects import pytrees as tree
from graphzero.step.build_inputs import BuildInputReader


def build(x, y=None, *more, **options): ...


A, B = torch.zeros(2), torch.ones(2)
CALLS = {
    "by place": ((A, B), {}, ["x", "y"]),
    "by name": ((), {"x": A, "y": B}, ["x", "y"]),
    "in another order": ((), {"y": B, "x": A}, ["y", "x"]),
    "both": ((A,), {"y": B}, ["x", "y"]),
    "no tensors": ((1, None), {"how": "so", "rate": 0.5, "on": True}, ["x", "y", "how", "rate", "on"]),
    "more than named": ((A, B, A), {"scale": 2}, ["x", "y", "more.0", "scale"]),
    "nested": (({"a": A, "b": [B, 1]},), {"y": None}, ["x.a", "x.b.0", "x.b.1", "y"]),
    "nothing in a list": (([], A), {}, ["y"]),
    "a parameter": ((torch.nn.Parameter(A, requires_grad=False),), {}, ["x"]),
}


def test_every_call_is_read_as_the_first_of_its_kind():
    placement = gz.placement("cpu", range(2), virtual=True)
    reader = BuildInputReader(build, placement)
    for _ in range(2):
        for what, (args, kwargs, names) in CALLS.items():
            found = reader.read_inputs(args, kwargs, {})
            leaves, spec = tree.flatten((args, kwargs))
            assert [leaf.name for leaf in found.leaves] == names, what
            assert all(leaf.raw is raw for leaf, raw in zip(found.leaves, leaves, strict=True)), what
            assert found.spec == spec, what


def test_what_build_cannot_take_is_refused_in_every_call():
    reader = BuildInputReader(lambda x: x, gz.placement("cpu", range(2), virtual=True))
    for _ in range(2):
        reader.read_inputs((A,), {}, {})
        with pytest.raises(TypeError, match="too many positional arguments"):
            reader.read_inputs((A, A), {}, {})
        with pytest.raises(TypeError, match="missing a required argument"):
            reader.read_inputs((), {}, {})
        with pytest.raises(TypeError, match="multiple values"):
            reader.read_inputs((A,), {"x": A}, {})
