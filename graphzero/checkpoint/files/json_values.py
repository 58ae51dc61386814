"""Python values as JSON and back, of the same types and bits; nothing that is read runs any code.

Values that JSON lacks are ``{"": kind, ...}``: tuples, dicts with keys that are not strings, numbers that are not
finite, tensors (by name; their values are in files of their own).
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphzero.errors import CheckpointError

MARK = ""
DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
_NUMBER = re.compile(r"bool|u?int(8|16|32|64)|b?float(8_\w+|16|32|64)|complex\d+")
NUMBERS = {x for name, x in DTYPES.items() if _NUMBER.fullmatch(name)}  # which torch casts to each other
STORED = NUMBERS | {x for name, x in DTYPES.items() if name.startswith(("bits", "float"))}  # which it can copy
# raised for altered values
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)
_LONG = 1 << 10  # bits of an int that is written as it is; of longer ones Python reads so many digits only
_TEXTS: dict[str, Callable[[str], Any]] = {
    "float": float, "complex": complex, "bytes": bytes.fromhex, "device": torch.device,
    "dtype": DTYPES.__getitem__, "int": lambda text: int(text, 16),
}  # fmt: skip
_DICTS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "ordered": collections.OrderedDict, "counter": collections.Counter, "dict": dict,
}  # fmt: skip


def to_json(x: Any, path: str, tensor: Callable[[Tensor, str], str]) -> Any:
    """``x`` as JSON.  tensor: gives the name of a tensor with a path.  Raises CheckpointError for other objects."""
    if isinstance(x, np.generic):
        x = x.item()
    if x is None or isinstance(x, (bool, str)):
        return x
    if isinstance(x, int):
        return x if x.bit_length() < _LONG else {MARK: "int", "value": hex(x)}
    if isinstance(x, float):
        return x if math.isfinite(x) else {MARK: "float", "value": str(x)}
    if isinstance(x, Tensor):
        return {MARK: "tensor", "name": tensor(x, path)}
    if type(x) in (list, tuple):
        items = [to_json(item, f"{path}.{i}", tensor) for i, item in enumerate(x)]
        return items if type(x) is list else {MARK: "tuple", "items": items}
    if isinstance(x, (torch.dtype, torch.device)):
        return {MARK: type(x).__name__, "value": str(x).removeprefix("torch.")}
    if isinstance(x, complex):
        return {MARK: "complex", "value": str(x)}
    if isinstance(x, bytes):
        return {MARK: "bytes", "value": x.hex()}
    if isinstance(x, Mapping):
        return _dict_to_json(x, path, tensor)
    raise CheckpointError(
        f"{path} is a {type(x).__module__}.{type(x).__qualname__}, which a checkpoint cannot hold: it holds "
        "numbers, strings, tensors, and lists, tuples and dicts of these, and never code; keep what is needed to "
        "create it again in extra=, and create it before gz.load"
    )


def _dict_to_json(x: Mapping[Any, Any], path: str, tensor: Callable[[Tensor, str], str]) -> Any:
    kind = next((name for name, cls in _DICTS.items() if type(x) is cls), "dict")
    if kind == "dict" and all(isinstance(key, str) for key in x) and MARK not in x:
        return {key: to_json(value, f"{path}.{key}", tensor) for key, value in x.items()}
    items = [
        [to_json(key, f"the key {key!r} of {path}", tensor), to_json(value, f"{path}.{key}", tensor)]
        for key, value in x.items()
    ]
    return {MARK: kind, "items": items}


def from_json(x: Any, tensor: Callable[[str], Any]) -> Any:
    """The value that ``to_json`` has written.  tensor: of a name.  Raises one of ``MALFORMED`` for other texts."""
    if isinstance(x, list):
        return [from_json(item, tensor) for item in x]
    if not isinstance(x, dict):
        return x
    if MARK not in x:
        return {key: from_json(item, tensor) for key, item in x.items()}
    kind = x[MARK]
    if kind == "tensor":
        return tensor(x["name"])
    if kind == "tuple":
        return tuple(from_json(item, tensor) for item in x["items"])
    if kind in _DICTS:
        return _DICTS[kind]({from_json(key, tensor): from_json(item, tensor) for key, item in x["items"]})
    if kind not in _TEXTS or not isinstance(x["value"], str):
        raise ValueError(f"{kind!r} {x['value']!r:.40} is not a value of a checkpoint")
    return _TEXTS[kind](x["value"])


def tensor_names(x: Any) -> Iterator[str]:
    """Names of the tensors in JSON from ``to_json``, in order.  Raises TypeError for a name that is not a string."""
    if isinstance(x, dict) and x.get(MARK) == "tensor":
        if not isinstance(x.get("name"), str):
            raise TypeError(f"{x.get('name')!r:.40} is not the name of a tensor")
        yield x["name"]
    elif isinstance(x, (dict, list)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from tensor_names(item)
