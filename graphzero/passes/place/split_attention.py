"""SplitAttention: attention over a split sequence, by an exchange of heads or a gather of keys.

Every query reads every key, so a rank that holds a piece of the sequence lacks most of what its queries read.  There
are two ways to give it that (``attention_ways``): ranks exchange pieces of the sequence for heads, or gather keys and
values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ops import ATTENTION, PIN
from graphzero.passes.base import BuiltinPass
from graphzero.passes.place.attention_ways import WAYS, PlannedPin, SplitSequence, split_sequence
from graphzero.passes.place.forward_sweep import swept
from graphzero.sbp.link_costs import Links

AUTO_WAY, RING = "auto", "ring"


@dataclass(frozen=True)
class SplitAttention(BuiltinPass):
    """Pins what attention over a split sequence reads and makes, so that ranks exchange heads or gather keys.

    It moves no data; boxing makes the collectives between the pins.  Attention stays as it is where neither way is
    possible.

    split_attention: "exchange", "gather", or "auto": exchange under a causal mask where queries are in contiguous
        pieces, which have unequal work, else what sends fewer bytes.  Where heads cannot be split, keys are gathered
        whatever it says.  "ring": as "gather"; ``RingAttention`` then lets them go round.
    links: what communication costs on each axis, () for bytes.

    Requires: pins on inputs, uses and gradients.
    Ensures: the same ops and pins, and further pins around attention; nothing is sent yet.

    Example::

        split_attention

        graph layer(cp=2) captured
          q    = batch()                              : f32[1, 4, 6, 8]   S(2)!
          k    = batch()                              : f32[1, 2, 6, 8]   S(2)!
          v    = batch()                              : f32[1, 4, 6, 8]   S(2)!
        forward:
          k1   = unsqueeze(k, 2)                      : f32[1, 2, 1, 6, 8]
          k2   = expand(k1, [1, 2, 2, 6, 8])          : f32[1, 2, 2, 6, 8]
          k3   = reshape(k2, [1, 4, 6, 8])            : f32[1, 4, 6, 8]
          pair = attention(q, k3, v, None, True, 0.5) : (f32[1, 4, 6, 8], f32[1, 4, 6])
          y    = pair[0]                              : f32[1, 4, 6, 8]
          return y
        ->
        graph layer(cp=2) captured
          q      = batch()                                      : f32[1, 4, 6, 8]   S(2)!
          k      = batch()                                      : f32[1, 2, 6, 8]   S(2)!
          v      = batch()                                      : f32[1, 4, 6, 8]   S(2)!
        forward:
          k1     = unsqueeze(k, 2)                              : f32[1, 2, 1, 6, 8]
          k1_pin = pin(k1, -1)                                  : f32[1, 2, 1, 6, 8]  S(1)!
          k2     = expand(k1_pin, [1, 2, 2, 6, 8])              : f32[1, 2, 2, 6, 8]
          k3     = reshape(k2, [1, 4, 6, 8])                    : f32[1, 4, 6, 8]
          q_pin  = pin(q, -1)                                   : f32[1, 4, 6, 8]   S(1)!
          v_pin  = pin(v, -1)                                   : f32[1, 4, 6, 8]   S(1)!
          pair   = attention(q_pin, k3, v_pin, None, True, 0.5) : (f32[1, 4, 6, 8], f32[1, 4, 6])
          y      = pair[0]                                      : f32[1, 4, 6, 8]
          y_pin  = pin(y, -1)                                   : f32[1, 4, 6, 8]   S(2)!
          return y_pin
    """

    split_attention: str = AUTO_WAY
    links: Links = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.split_attention not in (AUTO_WAY, *WAYS):
            raise ConfigError(
                f"SplitAttention(split_attention={self.split_attention!r}): the ways are {', '.join((AUTO_WAY, *WAYS))}"
            )

    def __call__(self, graph: StepGraph) -> StepGraph:
        done: set[tuple[int, fx.Node]] = set()
        while new := self._sequences(graph, done):
            done |= {(sequence.axis.axis, sequence.node) for sequence in new}
            places = {node: i for i, node in enumerate(graph.nodes)}
            for pin in dict.fromkeys(pin for sequence in new for pin in self._chosen(sequence)):
                _put(graph, new[0].axis.axis, pin, places)
        return graph

    def _sequences(self, graph: StepGraph, done: Collection[tuple[int, fx.Node]]) -> list[SplitSequence]:
        """All attention over a split sequence on the first axis on which there is any beside those in ``done``."""
        nodes = [node for node in graph.nodes if node.target is ATTENTION]
        for axis in swept(graph, self.links) if nodes else ():
            new = [node for node in nodes if (axis.axis, node) not in done]
            if sequences := [one for node in new if (one := split_sequence(axis, node)) is not None]:
                return sequences
        return []

    def _chosen(self, sequence: SplitSequence) -> list[PlannedPin]:
        """The pins of the way that is taken; none where there is no way."""
        ways, way = sequence.ways, "gather" if self.split_attention == RING else self.split_attention
        if way in ways:
            return ways[way]
        if "exchange" in ways and sequence.is_unequal:
            return ways["exchange"]
        return min(ways.values(), key=sequence.price, default=[])


def _put(graph: StepGraph, axis: int, planned: PlannedPin, places: Mapping[fx.Node, int]) -> None:
    """Add a pin behind its value; of a placeholder, in front of the first reader."""
    node, first = planned.box.node, min(planned.readers, key=places.__getitem__)
    with graph.graph.inserting_before(first if node.op == "placeholder" else node.next):
        pin = graph.call(PIN, (node, -1), value.tensor_type(node), like=planned.like, name=f"{node.name}_pin")
    axes = range(len(graph.placement.names))
    pin.meta["sbp"] = tuple(planned.box.want if i == axis else None for i in axes)
    pin.meta["pins"] = tuple(i == axis for i in axes)
    for reader in planned.readers:
        reader.replace_input_with(node, pin)
