"""Writes into tensors that exist already: states, and values that are not read again.

A result of the step that a write would change is copied before the first write.  A tensor that local ranks share is
written by one of them, after the last read of the others.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import inplace
from graphzero.ir.streams.places import Places
from graphzero.runtime import kernels
from graphzero.runtime.execute.code import Code
from graphzero.runtime.execute.steps import Env, Line
from graphzero.runtime.transport.primitives import place_of
from graphzero.runtime.world.host_copies import HostCopies


class Writes:
    """first_step: number of the first step that writes a state, -1 for none.

    saved: where a result is that a write would have changed.
    """

    def __init__(self, graph: StepGraph, places: Places, code: Code) -> None:
        self.graph, self.places, self.code = graph, places, code
        self.first_step = -1
        self.saved: dict[fx.Node, int] = {}
        written = {value.operand(node).name for node in graph.nodes if node.target is ops.assign}
        written |= {name for name, new in graph.updates.items() if places.home(new).name == name}
        self._unwritten = {n: new for n, new in graph.updates.items() if n not in written and new.name != n}
        self._endangered = self._find_endangered()

    # ---- the program's writes

    def assign(self, at: fx.Node, old: fx.Node, new: fx.Node) -> None:
        self.save(at, old.name)  # which may save ``new``
        target, source = self.places.of[old], self.saved.get(new, self.places.of[new])
        self._once(at, f"e[{target}].copy_(e[{source}])", [old], [target])

    def begin_to_host(self, node: fx.Node, copies: HostCopies) -> None:
        """Begin to copy a new state, or what goes into a room, to host memory."""
        old, new = value.operand(node), value.operand(node, 1)
        self._save_before(node, old)
        target, source = self.places.of[old], self.saved.get(new, self.places.of[new])
        self._once(node, f"{self.code.name(copies.begin)}(e[{target}], e[{source}])", [old], [target])

    def end_to_host(self, node: fx.Node, copies: HostCopies) -> None:
        """Wait until it is there."""
        target = self.places.of[node]
        call = f"{self.code.name(copies.end)}(e[{target}], e[{target}])"
        self._once(node, call, [self.places.home(node)], [target])

    def over_one(self, node: fx.Node, room: fx.Node) -> None:
        """Write a result into the storage of ``room``."""
        kernel, out_argument = kernels.writing(node, room)
        call = self.code.call(kernel, node.args, value.own_kwargs(node) | out_argument)
        self._save_and_write(node, call, [self.places.home(node)], [self.places.of[room]])

    def over_operands(self, node: fx.Node) -> None:
        """An op that works in its operands' storage: where a result has another, the operand is copied there first."""
        form, numbers = inplace.OVER_OPERANDS[node.target]
        lists: list[Any] = [[*map(self.code.text, arg)] if isinstance(arg, list) else None for arg in node.args]
        spots = [(at, k) for at in numbers for k in range(len(lists[at]))]
        picks, places = {user.args[1]: user for user in node.users}, self.places.results[node]
        outs = inplace.outs_of(node) or (None,) * len(spots)
        for i, ((at, k), room, place) in enumerate(zip(spots, outs, places, strict=True)):
            if room is None:
                names = tuple(filter(None, (picks[i].name if i in picks else None, (node.name, i))))
                self.code.add(f"e[{place}] = {lists[at][k]}.clone()", node, ((place, names),))
                lists[at][k] = f"e[{place}]"
        homes, count = [self.places.home(node, i) for i in range(len(spots))], len(lists[0])
        one_by_one = any(map(self.is_shared, homes))  # which rank writes what they share is settled for each
        for mine in [[k] for k in range(count)] if one_by_one else [range(count)]:
            words = [
                self.code.text(arg) if words is None else f"[{', '.join(words[k] for k in mine if words)}]"
                for words, arg in zip(lists, node.args, strict=True)
            ]
            words += [f"{key}={self.code.text(arg)}" for key, arg in value.own_kwargs(node).items()]
            call = f"{self.code.name(kernels.kernel(form))}({', '.join(words)})"
            of = [i for i, (_, k) in enumerate(spots) if k in mine]
            self._save_and_write(node, call, [homes[i] for i in of], [places[i] for i in of])

    def end(self, output: fx.Node) -> None:
        """New states that nothing in the program has written."""
        self.save(output)
        placeholders = {node.name: node for node in self.graph.placeholders()}
        for name, new in self._unwritten.items():
            self.assign(output, placeholders[name], new)

    # ---- values that must outlive a write

    def save(self, at: fx.Node, name: str | None = None) -> None:
        """Copy what would change when the state ``name`` (None: anything) is written."""
        if name is not None and self.first_step < 0:
            self.code.cut()
            self.first_step = len(self.code.steps)
        for node, roots in list(self._endangered.items()):
            if name is None or name in roots:
                del self._endangered[node]
                copy = self.saved[node] = self.places.new()
                self.code.add(f"e[{copy}] = e[{self.places.of[node]}].clone()", at, ((copy, (node.name,)),))

    def _find_endangered(self) -> dict[fx.Node, set[str]]:
        """Results whose storage is, or may be, that of persistent placeholders: node -> their names.

        They are copied before the first write; what is written last may itself be another one's old value.
        """
        endangered = {}
        returned = [*value.flat_nodes(self.graph.outputs), *self.graph.aux.values()]
        for node in (*returned, *self._unwritten.values()):
            roots = {root[0].name for root in self.places.roots[node] if root is not None}
            roots &= self.places.persistent.keys()
            if roots and node.target is not ops.assign:
                endangered[node] = roots
        return endangered

    # ---- tensors that ranks share

    def is_shared(self, old: fx.Node) -> bool:
        """Return whether local ranks may share one tensor, which one of them must not write while others read it."""
        split = value.is_tensor(old) and all(sbp.is_split for sbp in value.nd_of(old))
        return old.op == "placeholder" and len(self.code.locals) > 1 and not split

    def _save_and_write(self, node: fx.Node, call: str, homes: list[fx.Node], places: list[int]) -> None:
        for home in homes:
            self._save_before(node, home)
        self._once(node, call, homes, places)

    def _save_before(self, node: fx.Node, home: fx.Node) -> None:
        if home.name in self.places.persistent:
            self.save(node, home.name)

    def _once(self, node: fx.Node, call: str, homes: list[fx.Node], places: list[int]) -> None:
        """A call that writes into ``places``, which live in ``homes``: for each tensor once, if ranks share it."""
        if not any(map(self.is_shared, homes)):
            self.code.add(call, node)
            return
        segment = self.code.segment([Line(call, node)])

        def write(envs: list[Env]) -> None:
            written: dict[Any, Env] = {}
            for e in envs:
                storages = [place_of(e[place]) for place in places]
                first = next((written[one] for one in storages if one in written), None)
                if first is None:
                    segment.plain(e)
                    written.update(dict.fromkeys(storages, e))
                else:  # this rank's piece is that of the first: what it holds apart becomes the same
                    for one, place in zip(storages, places, strict=True):
                        if one not in written:
                            e[place].copy_(first[place])

        self.code.barrier(node, write)
