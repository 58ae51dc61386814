"""The number of tiles of rows with which a step fits a memory budget, and their description in its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphzero.passes import Options
from graphzero.plan import Budget, Candidate, PlanExtension, mega
from graphzero.plan.variants import Variants
from graphzero.plugins.row_tiles.row_region import NoRegion, RowRegion, row_region

ROW_TILES = "row_tiles"  # the setting
COUNTS = (2, 4, 8, 16)  # that are tried
NOTABLE = 1 / 8  # of the peak: what is smaller is not tried


def tiles_of(options: Options) -> int:
    """The number of tiles; 1 for none."""
    count: int = options.plugins.get(ROW_TILES, 1)
    return count


class TilesFit(PlanExtension):
    """The fewest tiles with which a step fits the budget; if none does, those with which it peaks lowest."""

    def find_fitting(
        self,
        variants: Variants,
        options: Options,
        budget: Budget,
        program: Candidate,
        best: Callable[[Options], Candidate],
    ) -> tuple[Options, Candidate, Sequence[str]]:
        best_so_far = options, program, ()
        if tiles_of(options) > 1 or options.pipeline_stages:
            return best_so_far
        for count in COUNTS:
            tiled = replace(options, plugins={**options.plugins, ROW_TILES: count})
            try:
                if _region_of(variants, tiled).nbytes < NOTABLE * program.peak:
                    break
            except NoRegion:
                break
            other = best(tiled)
            if other.peak < best_so_far[1].peak:
                best_so_far = tiled, other, ()
            if other.peak <= budget.nbytes:
                break
        return best_so_far

    def describe_program(self, variants: Variants, options: Options, program: Candidate) -> Candidate:
        if (tiles := tiles_of(options)) == 1:
            return program
        try:
            region = _region_of(variants, options)
        except NoRegion as error:
            return program.decided(after=f"nothing is computed in {tiles} tiles of rows: {error}")
        return program.decided(
            after=f"in {region.count} tiles of rows: '{region.largest.name}', {mega(region.nbytes)} in one piece, and "
            f"{len(region.nodes) - 1} more values around it"
        )


def _region_of(variants: Variants, options: Options) -> RowRegion:
    """The region that these options compute in tiles.  Raises NoRegion where there is none."""
    return row_region(variants.before("tile_rows", options), tiles_of(options))
