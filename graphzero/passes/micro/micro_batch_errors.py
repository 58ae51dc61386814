"""Errors and warnings of micro-batches: ops that need the whole batch, and values that are only estimated."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import value
from graphzero.ir.ragged import PADDING
from graphzero.ir.text.printer import print_line
from graphzero.passes.micro.loop_partition import LoopPartition
from graphzero.passes.micro.micro_batch_types import MicroBatchTypes
from graphzero.sbp.placement import MICRO_BATCHES


@dataclass(frozen=True)
class MicroBatchErrors:
    """Errors of one program.  name: of the program.  axes: names of the placement's, ``mb`` among them."""

    name: str
    axes: tuple[str, ...]
    partition: LoopPartition
    types: MicroBatchTypes

    def needs_whole_batch(self, node: fx.Node, problem: str) -> ConfigError:
        where = value.source_of(node)
        return ConfigError(
            f"set_gradient_accumulation_steps({self.types.count}): '{node.name}' {problem}, so it needs the "
            f"whole batch at once\n  > {print_line(node)}"
            + (f"\n    {where}" if where else "")
            + "\n  Compute it for each sample, or do not use micro-batches here"
            + self._uncut_inputs()
        )

    def _uncut_inputs(self) -> str:
        """Advice where micro-batches have parts of some inputs and all of others; "" elsewhere."""
        roles = [(node, role) for node in self.partition.nodes if (role := value.role_of(node)) is not None]
        inputs = [(node, role.of) for node, role in roles if role.kind == "batch" and value.tensor_type(node).shape]
        whole = [name for node, name in inputs if self.partition.sbp(node).is_broadcast]
        cut = [name for node, name in inputs if self.partition.sbp(node).is_split]
        if not whole or not cut:
            return ""
        return (
            f".\n  Each micro-batch has all rows of {', '.join(whole)}, and its own of {', '.join(cut)}: with an axis "
            "of the placement whose name begins with dp, if of one rank, set_input can give all of them S(0) there"
        )

    def mismatch(self, source: fx.Node, box: fx.Node) -> str:
        have, want = self.partition.sbp(source), self.partition.sbp(box)
        if have is not want:
            return f"is {have} over the micro-batches, and is to be {want}"
        nds = self.types.others(source), self.types.others(box)
        names = [name for name in self.axes if name != MICRO_BATCHES]
        axes = [name for name, a, b in zip(names, *nds, strict=True) if a is not b]
        cuts = " and ".join(f"({', '.join(map(str, nd))})" for nd in nds)
        return f"has its rows cut as {cuts}: {', '.join(axes)} would mix the rows of micro-batches"

    def check_plain(self, node: fx.Node) -> None:
        if self.partition.sbp(node).sections > 1:
            raise self.needs_whole_batch(
                node, f"is cut as {self.partition.sbp(node)} over the micro-batches, in pieces of each row"
            )

    def warn(self) -> None:
        lines = self.partition.estimated_lines()
        if lines and self._has_padded_rows():
            raise ConfigError(
                f"set_gradient_accumulation_steps({self.types.count}) and set_shapes: a statistic of a micro-batch "
                f"replaces that of the batch here, and padded rows are not spread evenly over them: {lines[0]}\n  "
                "Compute it for each sample, do without micro-batches, or without ragged rows"
            )
        if lines:
            shown = "; ".join(lines[:6]) + (f"; and {len(lines) - 6} more" if len(lines) > 6 else "")
            warnings.warn(
                f"{self.name}: with {self.types.count} micro-batches these are statistics of a micro-batch, not of the "
                f"batch, and the model computes with them: {shown}",
                stacklevel=2,
            )

    def _has_padded_rows(self) -> bool:
        placeholders = (node for node in self.partition.nodes if node.op == "placeholder")
        padding = (node for node in placeholders if (role := value.role_of(node)) and role.of.startswith(PADDING))
        return any(self.partition.sbp(node).is_split for node in padding)
