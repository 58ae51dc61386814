"""Order in which layouts of a step are priced, and those that are left out.

Prices are exact but take a compilation each, so layouts are priced in the order of what they may take, a guess read off
the plainest layout of the same grid, and not at all where a bound says that they cannot come among the best.  It ends
when none is left, or the time is over.  What is left out, and why, is counted.

Left out from the start: what cannot be faster than a layout that fits anyway (recomputation and an optimizer in
backward where the step fits without; more micro-batches where these were slower on the same grid), and what cannot fit
(states alone are more than there is room for).
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from graphzero.errors import ConfigError
from graphzero.plan.device import Device
from graphzero.plugins.tune.captured_step import CapturedStep
from graphzero.plugins.tune.layout import Layout, counts, layouts
from graphzero.plugins.tune.price import Bound, Price, price
from graphzero.plugins.tune.proposal import Proposal, propose, propose_like

Axes = tuple[tuple[str, int], ...]
SLOWER = "in more micro-batches, which are slower on the same grid where the step fits"
STATES = "states alone do not fit"
TIME = "not priced in the time given"
BEHIND = "cannot be faster than the last one shown"
REFUSED = "cannot be had"


@dataclass
class SearchResult:
    """Result of a search.

    fitting: the layouts that fit, fastest first.  too_large: those that do not, the smallest first.
    left_out: why -> how many were not priced.  least: why -> seconds that none of these can undercut.
    states: the least bytes of parameters and optimizer states of a layout, and which one.
    proposals: of the grids that split weights.  refused: grid or layout -> why it cannot be had.  ranks: of all grids.
    """

    room: int
    ranks: int = 0
    fitting: list[Price] = field(default_factory=list)
    too_large: list[Price] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    least: dict[str, float] = field(default_factory=dict)
    states: tuple[float, Layout] | None = None
    proposals: dict[Axes, Proposal] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def priced(self) -> int:
        return len(self.fitting) + len(self.too_large)


def _uneven(rows: int, data: int) -> str:
    """Say why so many data ranks are not tried, and which numbers of rows would do: the nearest multiples."""
    each, over = divmod(rows, data)
    near = [n for n in (each * data, (each + 1) * data) if n]
    return (
        f"they do not divide the {rows} rows of the batch: {data} x {each} leaves {over} over; "
        f"{' or '.join(map(str, near))} rows would do"
    )


def _grid_text(axes: Axes) -> str:
    return str(Layout(axes)).partition(",")[0]


class Search:
    """Prices layouts of a step on a device.  grids: axes of placements.

    top: how many are needed.  seconds: of the processor, in which the search begins to price others.
    report: called for each price.
    """

    def __init__(
        self, step: CapturedStep, device: Device, room: int, *, top: int = 10, seconds: float = 120.0,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.step, self.device, self.top = step, device, top
        self.ends = time.process_time() + seconds
        self.report = report
        self.result = SearchResult(room)
        self._waiting: list[tuple[float, int, int, int, Layout]] = []  # in the order in which they are priced
        self._added = 0
        self._slower: set[Axes] = set()  # grids on which more micro-batches took longer
        self._bounds: dict[Axes, Bound] = {}
        self._priced: dict[Layout, Price] = {}

    def rank_layouts(self, grids: Sequence[Axes], uneven: Sequence[int] = ()) -> SearchResult:
        """Price what is worth it.  uneven: numbers of data ranks that do not divide the rows of a step."""
        self.result.ranks = Layout(grids[0]).ranks
        for data in uneven:
            self.result.refused[f"{data} data ranks"] = _uneven(self.step.rows, data)
        for axes in grids:
            if (plain := self._plainest(axes)) is not None:
                self._bounds[axes] = Bound(plain, self.device)
                states = [(self._bounds[axes].states(layout), layout) for layout in layouts(axes)]
                self.result.states = min([*states, *filter(None, [self.result.states])], key=lambda one: one[0])
                self._note(plain)
                for layout in layouts(axes)[1:]:
                    self._add(layout)
        while self._waiting:
            *_, layout = heapq.heappop(self._waiting)
            if (over := self._over(layout)) is None:
                self._price(layout)
            else:
                self._leave_out(layout, over)
        self.result.fitting.sort(key=lambda one: (one.seconds, one.peak))
        self.result.too_large.sort(key=lambda one: one.peak)
        return self.result

    def _over(self, layout: Layout) -> str | None:
        """Say why a layout is not priced; None where it is."""
        fastest = sorted(one.seconds for one in self.result.fitting)[: self.top]
        if len(fastest) == self.top and self._bounds[layout.axes].seconds(layout) > fastest[-1]:
            return BEHIND
        return TIME if self.result.priced >= len(self._bounds) and time.process_time() > self.ends else None

    def _leave_out(self, layout: Layout, why: str) -> None:
        """Count it, and go on with more micro-batches, which may have a lower bound."""
        least = self._bounds[layout.axes].seconds(layout)
        self.result.left_out[why] += 1
        self.result.least[why] = min(self.result.least.get(why, least), least)
        more = replace(layout, micro_batches=2 * layout.micro_batches)
        if why == BEHIND and more.micro_batches in counts(self.step.rows // layout.data_ranks):
            self._add(more)

    def _plainest(self, axes: Axes) -> Price | None:
        """The plainest layout of a grid with the splits that are proposed for it; None where it cannot be had."""
        try:
            return self._plainest_of(axes)
        except ConfigError as error:
            if Layout(axes).members == 1:
                raise
            self.result.refused[_grid_text(axes)] = str(error).splitlines()[0]
            return None

    def _plainest_of(self, axes: Axes) -> Price | None:
        layout, results = Layout(axes), self.result
        if not layout.tensor_axis or self.step.weights_axes:
            self.report(f"{layout}")
            return price(self.step, layout, {}, self.device)
        first = next(iter(results.proposals.values()), None)
        self.report(f"splits for {layout}")
        if first is None:
            proposal = propose(self.step, layout, self.device)
        else:
            proposal = propose_like(self.step, layout, self.device, first)
        results.proposals[axes] = proposal
        if not proposal.kinds:
            results.refused[_grid_text(axes)] = "no weight is worth splitting"
            return None
        return proposal.plain

    def _add(self, layout: Layout) -> None:
        bound = self._bounds[layout.axes]
        if bound.states(layout) > self.result.room:
            self.result.left_out[STATES] += 1
            return
        self._added += 1
        order = bound.guess(layout), layout.micro_batches, layout.stage, self._added
        heapq.heappush(self._waiting, (*order, layout))

    def _price(self, layout: Layout) -> None:
        plain = self._bounds[layout.axes].plain
        try:
            self._note(price(self.step, layout, plain.splits, self.device))
        except ConfigError as error:
            self.result.left_out[REFUSED] += 1
            self.result.refused[str(layout)] = str(error).splitlines()[0]

    def _note(self, price: Price) -> None:
        """Note the consequences of a price for its layout, and for others."""
        layout = price.layout
        fits = price.peak <= self.result.room
        (self.result.fitting if fits else self.result.too_large).append(price)
        self.report(f"{layout}: {price.seconds * 1e3:.2f} ms, {price.peak / 1e9:.2f} GB{'' if fits else ', too large'}")
        self._priced[layout] = price
        if not (layout.recompute or layout.early):
            self._in_more_parts(layout, price)
            if not fits:
                self._at_less_memory(layout, price)

    def _in_more_parts(self, layout: Layout, price: Price) -> None:
        """Go on with more micro-batches, unless these are slower than fewer that fit."""
        share = self.step.rows // layout.data_ranks
        more = [replace(layout, micro_batches=k) for k in counts(share) if k > layout.micro_batches]
        before = self._priced.get(replace(layout, micro_batches=layout.micro_batches // 2))
        if before is not None and before.peak <= self.result.room and before.seconds <= price.seconds:
            self._slower.add(layout.axes)
        if more and price.peak <= self.result.room and layout.axes in self._slower:
            self.result.left_out[SLOWER] += len(more)
        elif more:
            self._add(more[0])

    def _at_less_memory(self, layout: Layout, price: Price) -> None:
        """Go on with what saves memory, as far as it may be enough."""
        at_peak = price.plan.memory.at_peak
        for other in layout.smaller():
            spared = at_peak["gradients"] * other.early + at_peak["activations"] * other.recompute
            if price.peak - spared <= self.result.room:
                self._add(other)
