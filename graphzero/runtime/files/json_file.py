"""A user's file of JSON: a device, links, a measured timeline, another library's configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from graphzero.errors import ConfigError
from graphzero.runtime.files.json_values import parsed


def read_json(path: str | os.PathLike[str], what: str, how: str) -> Any:
    """What is in it.  what: what messages begin with.  how: the next step, if it is not there or no JSON.

    Raises ConfigError for a file that cannot be read, and for text that is no JSON: see ``parsed``.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{what}: cannot read it ({error.strerror}); {how}") from None
    except ValueError as error:  # no UTF-8, or a path that no file can have
        raise ConfigError(f"{what}: it is no text ({error}); {how}") from None
    try:
        return parsed(text)
    except ValueError as error:
        raise ConfigError(f"{what}: it is no JSON: {error}; {how}") from None
