"""Check that ranks which should get equal inputs have got them.

A 0-d tensor, one that ``set_input`` says is B, and a batch along the axes that do not split it, is taken for equal on
the ranks of such an axis; along ``pp`` all inputs are.  Small ones are part of each call's agreement; larger ones are
compared in the first calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphzero import _compat
from graphzero.capture import Input, Inputs
from graphzero.errors import CaptureError
from graphzero.runtime.tensors.fingerprint import content
from graphzero.runtime.world.consensus import INPUTS, Ranks, by_value
from graphzero.sbp.placement import PIPELINE, Placement
from graphzero.step.build_inputs import text_of

_SMALL = 16  # elements
FIRST = 2  # calls of a program in which larger inputs are compared


class ReplicatedInputs:
    """Inputs of a call that several ranks must get with equal values: by their numbers among the leaves.

    small: those compared in each call.  calls: how often the others have been compared.
    """

    def __init__(self, inputs: Inputs, placement: Placement) -> None:
        leaves = list(enumerate(inputs.leaves))
        self.all = [i for i, leaf in leaves if leaf.is_tensor and _shared_axes(leaf, placement)]
        self.small = [i for i in self.all if _is_small(inputs.leaves[i])]
        self.calls = 0

    def values(self, inputs: Inputs) -> list[str]:
        """Values of the small ones; not on a GPU, for which the host would have to wait."""
        raws = [inputs.leaves[i].raw for i in self.small]
        return [repr(raw.tolist()) if raw.device.type == "cpu" else f"on {raw.device.type}" for raw in raws]

    def describe(self, inputs: Inputs) -> dict[str, str]:
        """The same by name."""
        names = [f"values of input {inputs.leaves[i].name}" for i in self.small]
        return dict(zip(names, self.values(inputs), strict=True))

    def check(self, inputs: Inputs, ranks: Ranks) -> None:
        """Compare all of them.  Every rank calls it.  Raises CaptureError on all ranks where some differ."""
        self.calls += 1
        leaves = [inputs.leaves[i] for i in self.all]
        everyone = ranks.collect([content(leaf.raw) for leaf in leaves])
        differences = [_difference(*each, ranks) for each in zip(leaves, zip(*everyone, strict=True), strict=True)]
        failure = next(filter(None, differences), None)  # the same on all ranks, as what they have told each other
        if failure is not None:
            ranks.agree(INPUTS, failure=failure)


def _shared_axes(leaf: Input, placement: Placement) -> list[int]:
    names = [name for name in placement.names if name != PIPELINE]  # each stage is given all inputs
    splits = {placement.axis(name) for name, sbp in zip(names, leaf.nd, strict=False) if not sbp.is_broadcast}
    return [axis for axis, ranks in enumerate(placement.hierarchy) if ranks > 1 and axis not in splits]


def _is_small(leaf: Input) -> bool:
    is_whole = all(sbp.is_broadcast for sbp in leaf.nd)
    return is_whole and leaf.raw.numel() <= _SMALL and not _compat.is_dtensor(leaf.raw)


def _difference(leaf: Input, hashes: Sequence[int], ranks: Ranks) -> CaptureError | None:
    placement = ranks.placement
    shared = _shared_axes(leaf, placement)
    hashes_by_group: dict[tuple[int, ...], dict[int, int]] = {}
    for rank, number in zip(ranks.ids, hashes, strict=True):
        at = placement.coordinate(rank)
        hashes_by_group.setdefault(tuple(c for axis, c in enumerate(at) if axis not in shared), {})[rank] = number
    for group in hashes_by_group.values():
        if len(set(group.values())) > 1:
            axes = ", ".join(placement.names[axis] for axis in shared)
            values = "; ".join(by_value(list(group), [f"hash {number:x}" for number in group.values()]))
            return CaptureError(
                f"the ranks are given other values of input {leaf.name}, which is {text_of(leaf)}, the same along "
                f"{axes}: {values}\n  Give ranks along an axis that does not split an input equal ones: load the batch "
                "by the place along the data axes, reduce a rank's own numbers first (torch.distributed.all_reduce), "
                f"or say that it is split: config.set_input({leaf.name!r}, sbp=...)"
            )
    return None
