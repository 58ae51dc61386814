"""The largest intermediate values of a step, as a language model's logits, are computed in tiles of rows."""

from graphzero.config import GraphConfig, PluginSetting
from graphzero.config.setting import whole_number
from graphzero.passes import PassEntry
from graphzero.plugins.row_tiles.tile_rows import TileRows
from graphzero.plugins.row_tiles.tiles_fit import TilesFit, tiles_of


def set_row_tiles(config: GraphConfig, count: int) -> int:
    """Compute the largest intermediate values of a step in ``count`` tiles of rows; 1, the default, for no tiles.

    The logits of a language model are such values: [tokens, classes] between hidden values and a loss.  Forward
    and backward of one tile run together, then those of the next, so only one tile's logits are held at a time.
    Nothing is computed twice; sums over rows are rounded differently.  Tiles are equal: if ``count`` does not
    divide a rank's rows, the next larger number up to its double that does is used, or else the next smaller one.
    A step without such values stays as it is, and ``plan.decisions`` says why.
    """
    return count


SETTING = PluginSetting(
    default=1, check=whole_number(1, "give the number of tiles, 1 or more; 1 for none"), method=set_row_tiles
)
PASS = PassEntry(TileRows, "boxed", lambda options: tiles_of(options) > 1, after="micro_batches", adds_up=True)
PLAN = TilesFit()
