"""Tiles of rows: their description, and how many are needed to fit a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from graphzero.passes import Options
from graphzero.passes.micro.row_region import NoRegion, RowRegion, row_region
from graphzero.plan.budget import Budget
from graphzero.plan.plan import mega
from graphzero.plan.variants import Candidate, Variants

COUNTS = (2, 4, 8, 16)  # that are tried
NOTABLE = 1 / 8  # of the peak: what is smaller is not tried


def region_of(variants: Variants, options: Options) -> RowRegion:
    """Return the region that these options compute in tiles.  Raises NoRegion where there is none."""
    return row_region(variants.before("tile_rows", options), options.tiles)


def fitting_tiles(
    variants: Variants, options: Options, budget: Budget, plain: Candidate, best: Callable[[Options], Candidate]
) -> tuple[Options, Candidate]:
    """The fewest tiles with which a step fits the budget; if none does, those with which it peaks lowest.

    best: makes the program of options.  plain: without tiles, which does not fit.
    """
    best_so_far = options, plain
    if options.tiles > 1:
        return best_so_far
    for count in COUNTS:
        tiled = replace(options, tiles=count)
        try:
            if region_of(variants, tiled).nbytes < NOTABLE * plain.peak:
                break
        except NoRegion:
            break
        program = best(tiled)
        if program.peak < best_so_far[1].peak:
            best_so_far = tiled, program
        if program.peak <= budget.nbytes:
            break
    return best_so_far


def described(variants: Variants, options: Options, candidate: Candidate) -> Candidate:
    """The same, with words on its tiles."""
    try:
        region = region_of(variants, options)
    except NoRegion as error:
        return candidate.decided(after=f"nothing is computed in {options.tiles} tiles of rows: {error}")
    return candidate.decided(
        after=f"in {region.count} tiles of rows: '{region.largest.name}', {mega(region.nbytes)} in one piece, and "
        f"{len(region.nodes) - 1} more values around it"
    )
