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
from graphzero.passes.place.forward_sweep import swept
from graphzero.plugins.split_attention.attention_choice import (
    AUTO_WAY,
    AttentionChoice,
    choose_way,
    way_on,
    ways_by_axis,
)
from graphzero.plugins.split_attention.attention_ways import PlannedPin, SplitSequence, split_sequence
from graphzero.sbp.link_costs import Links
from graphzero.sbp.placement import MICRO_BATCHES


@dataclass(frozen=True)
class SplitAttention(BuiltinPass):
    """Pins what attention over a split sequence reads and makes, so that ranks exchange heads or gather keys.

    It moves no data; boxing makes the collectives between the pins.  Attention stays as it is where neither way is
    possible.

    split_attention: "exchange", "gather", or "auto": exchange under a causal mask where queries are in contiguous
        pieces, which have unequal work, else what sends fewer bytes, those counted in that a rank makes of a mask.
        Where heads cannot be split, keys are gathered whatever it says.  "ring": as "gather"; ``RingAttention`` then
        lets them go round.  On one axis another: "gather exchange@cp".
    links: what communication costs on each axis, () for bytes.

    Requires: pins on inputs, uses and gradients.
    Ensures: the same ops and pins, and further pins around attention; nothing is sent yet.

    Example::

        split_attention

         graph layer(cp=2) captured
           q = batch() : f32[1, 4, 6, 8]  S(2)!
           k = batch() : f32[1, 2, 6, 8]  S(2)!
           v = batch() : f32[1, 4, 6, 8]  S(2)!
         forward:
           k1 = unsqueeze(k, 2) : f32[1, 2, 1, 6, 8]
        -  k2 = expand(k1, [1, 2, 2, 6, 8]) : f32[1, 2, 2, 6, 8]
        +  k1_pin = pin(k1, -1) : f32[1, 2, 1, 6, 8]  S(1)!
        +  k2 = expand(k1_pin, [1, 2, 2, 6, 8]) : f32[1, 2, 2, 6, 8]
           k3 = reshape(k2, [1, 4, 6, 8]) : f32[1, 4, 6, 8]
        -  pair = attention(q, k3, v, None, True, 0.5) : (f32[1, 4, 6, 8], f32[1, 4, 6])
        +  q_pin = pin(q, -1) : f32[1, 4, 6, 8]  S(1)!
        +  v_pin = pin(v, -1) : f32[1, 4, 6, 8]  S(1)!
        +  pair = attention(q_pin, k3, v_pin, None, True, 0.5) : (f32[1, 4, 6, 8], f32[1, 4, 6])
           y = pair[0] : f32[1, 4, 6, 8]
        -  return y
        +  y_pin = pin(y, -1) : f32[1, 4, 6, 8]  S(2)!
        +  return y_pin
    """

    split_attention: str = AUTO_WAY
    links: Links = field(default=(), repr=False)

    def __post_init__(self) -> None:
        try:
            ways_by_axis(self.split_attention)
        except ValueError as error:
            raise ConfigError(f"SplitAttention(split_attention={self.split_attention!r}): {error}") from None

    def __call__(self, graph: StepGraph) -> StepGraph:
        self.decide(graph)
        return graph

    def decide(self, graph: StepGraph) -> list[AttentionChoice]:
        """Put the pins, and return what was chosen for each attention over a split sequence.

        Inner axes come first: what is exchanged there leaves whole pieces to the outer ones.
        """
        done, own = set[tuple[int, fx.Node]](), set[fx.Node]()
        choices: list[AttentionChoice] = []
        bandwidth = max((link.bandwidth for link in self.links), default=0.0)
        sizes = dict(zip(graph.placement.names, graph.placement.hierarchy, strict=True))
        of_all = bandwidth, sizes.get(MICRO_BATCHES, 1)
        while new := self._sequences(graph, done):
            done |= {(sequence.axis.axis, sequence.node) for sequence in new}
            places, axis = {node: i for i, node in enumerate(graph.nodes)}, new[0].axis.axis
            name, pins = graph.placement.names[axis], dict[PlannedPin, None]()
            for sequence in new:
                if (chosen := choose_way(sequence, way_on(self.split_attention, name))) is not None:
                    way, why = chosen
                    ways = tuple(sequence.ways.values())
                    choices.append(AttentionChoice(sequence.node.name, name, way.name, why, ways, *of_all))
                    pins |= dict.fromkeys(way.pins)
            for pin in pins:
                _put(graph, axis, pin, places, own)
        return choices

    def _sequences(self, graph: StepGraph, done: Collection[tuple[int, fx.Node]]) -> list[SplitSequence]:
        """All attention over a split sequence on the last axis on which there is any besides those in ``done``."""
        nodes = [node for node in graph.nodes if node.target is ATTENTION]
        for axis in reversed(swept(graph, self.links) if nodes else ()):
            new = [node for node in nodes if (axis.axis, node) not in done]
            if sequences := [one for node in new if (one := split_sequence(axis, node)) is not None]:
                return sequences
        return []


def _put(graph: StepGraph, axis: int, planned: PlannedPin, places: Mapping[fx.Node, int], own: set[fx.Node]) -> None:
    """Add a pin after its value; of a placeholder, before the first reader.

    own: pins of this pass.  One of another axis that is there already gets it too: then the value is moved once, along
    both axes, in the order in which least is sent.
    """
    pin = _adjacent_pin(axis, planned, own)
    if pin is None:
        node, first = planned.box.node, min(planned.readers, key=places.__getitem__)
        with graph.graph.inserting_before(first if node.op == "placeholder" else node.next):
            pin = graph.call(PIN, (node, -1), value.tensor_type(node), like=planned.like, name=f"{node.name}_pin")
        for reader in planned.readers:
            reader.replace_input_with(node, pin)
        own.add(pin)
    graph.pin(pin, graph.placement.names[axis], planned.box.want)


def _adjacent_pin(axis: int, planned: PlannedPin, own: Collection[fx.Node]) -> fx.Node | None:
    """The pin of another axis that is the value, or all that reads it, for the same readers; None where none is."""
    node, readers = planned.box.node, set(planned.readers)
    pins = [node] if readers == set(node.users) else []
    pins += readers if len(readers) == 1 else ()
    return next((pin for pin in pins if pin in own and not value.pins_of(pin)[axis]), None)
