"""The reader of DeepSpeed's JSON: ``gz.GraphConfig.from_deepspeed``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from graphzero.config import GraphConfig
from graphzero.plugins.deepspeed.document import Document
from graphzero.plugins.deepspeed.landing import land
from graphzero.plugins.deepspeed.ported import DeepSpeed


def read_deepspeed(config: GraphConfig, given: str | os.PathLike[str] | Mapping[str, Any]) -> DeepSpeed:
    """The configuration that DeepSpeed's JSON says, for ``gz.Graph(config=...)``.

    given: the path of the JSON, or its dict.  placement: as for a Graph; by default all ranks of the world.

    Settings of the result are those of the other methods here, and may be changed by them.  Batch sizes, optimizer,
    schedule and clipping are not settings; they are in ``deepspeed``.  One warning names the keys whose work something
    else does.  docs/from_deepspeed.md says what becomes of each key.

    Raises ConfigError for batch sizes that contradict each other or the ranks, for keys that DeepSpeed does not
    know, for "auto" where it cannot be computed, and for keys without which results would be others.
    """
    document = Document(given)
    deepspeed = land(document, config.placement, config)
    if document.replaced:
        lines = "\n  ".join(document.replaced)
        warnings.warn(f"{document.name}: these keys are replaced here\n  {lines}", stacklevel=3)
    return deepspeed
