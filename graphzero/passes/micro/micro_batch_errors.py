"""What cannot be computed in micro-batches, and what is only that of a micro-batch, said at its line."""

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
    """name: of the program.  axes: names of the placement's, ``mb`` among them."""

    name: str
    axes: tuple[str, ...]
    parts: LoopPartition
    sizes: MicroBatchTypes

    def all_at_once(self, node: fx.Node, problem: str) -> ConfigError:
        where = value.source_of(node)
        return ConfigError(
            f"set_gradient_accumulation_steps({self.sizes.count}): '{node.name}' {problem}, so that the whole "
            f"batch would have to be there at once\n  > {print_line(node)}"
            + (f"\n    {where}" if where else "")
            + "\n  Compute it for each sample, or do without micro-batches here"
        )

    def mismatch(self, source: fx.Node, box: fx.Node) -> str:
        have, made = self.parts.sbp(source), self.parts.sbp(box)
        if have is not made:
            return f"is {have} over the micro-batches, and is to be {made}"
        nds = self.sizes.others(source), self.sizes.others(box)
        names = [name for name in self.axes if name != MICRO_BATCHES]
        axes = [name for name, a, b in zip(names, *nds, strict=True) if a is not b]
        cuts = " and ".join(f"({', '.join(map(str, nd))})" for nd in nds)
        return f"has its rows cut as {cuts}: {', '.join(axes)} would mix the rows of micro-batches"

    def check_plain(self, node: fx.Node) -> None:
        if self.parts.sbp(node).sections > 1:
            raise self.all_at_once(
                node, f"is cut as {self.parts.sbp(node)} over the micro-batches, in pieces of each row"
            )

    def warn(self) -> None:
        lines = list(
            dict.fromkeys(
                value.source_of(value.operand(b)) or b.name for b in self.parts.nodes if b in self.parts.estimated
            )
        )
        if lines and self._has_padded_rows():
            raise ConfigError(
                f"set_gradient_accumulation_steps({self.sizes.count}) and set_shapes: a statistic of a micro-batch "
                f"stands for that of the batch here, and padded rows are not spread evenly over them: {lines[0]}\n  "
                "Compute it for each sample, do without micro-batches, or without ragged rows"
            )
        if lines:
            shown = "; ".join(lines[:6]) + (f"; and {len(lines) - 6} more" if len(lines) > 6 else "")
            warnings.warn(
                f"{self.name}: with {self.sizes.count} micro-batches these are statistics of a micro-batch, not of the "
                f"batch, for what the model computes next depends on them: {shown}",
                stacklevel=2,
            )

    def _has_padded_rows(self) -> bool:
        roles = ((node, value.role_of(node)) for node in self.parts.nodes if node.op == "placeholder")
        return any(
            role is not None and role.of.startswith(PADDING) and self.parts.sbp(node).is_split for node, role in roles
        )
