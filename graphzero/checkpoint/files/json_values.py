"""Python values as JSON and back, of the same types and bits; nothing that is read runs any code.

What JSON has no word for is ``{"": kind, ...}``: tuples, dicts with keys that are no strings, numbers that are not
finite, tensors (by name; they stand in a file of their own).
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
MALFORMED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    OverflowError,
)  # of values that nobody wrote
_LONG = 1 << 10  # bits of an int that is written as it is; of longer ones Python reads so many digits only
_TEXTS: dict[str, Callable[[str], Any]] = {
    "float": float, "complex": complex, "bytes": bytes.fromhex, "device": torch.device,
    "dtype": DTYPES.__getitem__, "int": lambda text: int(text, 16),
}  # fmt: skip
_DICTS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "ordered": collections.OrderedDict, "counter": collections.Counter, "dict": dict,
}  # fmt: skip


def to_json(x: Any, path: str, tensor: Callable[[Tensor, str], str]) -> Any:
    """``x`` in JSON's words.  tensor: keeps a tensor and says its name.  Raises CheckpointError for other objects."""
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
        made = [to_json(held, f"{path}.{i}", tensor) for i, held in enumerate(x)]
        return made if type(x) is list else {MARK: "tuple", "items": made}
    if isinstance(x, (torch.dtype, torch.device)):
        return {MARK: type(x).__name__, "value": str(x).removeprefix("torch.")}
    if isinstance(x, complex):
        return {MARK: "complex", "value": str(x)}
    if isinstance(x, bytes):
        return {MARK: "bytes", "value": x.hex()}
    if isinstance(x, Mapping):
        return _dict_to_json(x, path, tensor)
    raise CheckpointError(
        f"{path} is a {type(x).__module__}.{type(x).__qualname__}, for which a checkpoint has no words: it holds "
        "numbers, strings, tensors, and lists, tuples and dicts of these, and never code; keep what is needed to make "
        "it anew in extra=, and make it before gz.load"
    )


def _dict_to_json(x: Mapping[Any, Any], path: str, tensor: Callable[[Tensor, str], str]) -> Any:
    kind = next((name for name, made in _DICTS.items() if type(x) is made), "dict")
    if kind == "dict" and all(isinstance(key, str) for key in x) and MARK not in x:
        return {key: to_json(held, f"{path}.{key}", tensor) for key, held in x.items()}
    items = [
        [to_json(key, f"the key {key!r} of {path}", tensor), to_json(held, f"{path}.{key}", tensor)]
        for key, held in x.items()
    ]
    return {MARK: kind, "items": items}


def from_json(x: Any, tensor: Callable[[str], Any]) -> Any:
    """What ``to_json`` was given.  tensor: by name.  Raises one of ``MALFORMED`` for what it never makes."""
    if isinstance(x, list):
        return [from_json(held, tensor) for held in x]
    if not isinstance(x, dict):
        return x
    if MARK not in x:
        return {key: from_json(held, tensor) for key, held in x.items()}
    kind = x[MARK]
    if kind == "tensor":
        return tensor(x["name"])
    if kind == "tuple":
        return tuple(from_json(held, tensor) for held in x["items"])
    if kind in _DICTS:
        return _DICTS[kind]({from_json(key, tensor): from_json(held, tensor) for key, held in x["items"]})
    if kind not in _TEXTS or not isinstance(x["value"], str):
        raise ValueError(f"{kind!r} {x['value']!r:.40} is no value of a checkpoint")
    return _TEXTS[kind](x["value"])


def tensor_names(x: Any) -> Iterator[str]:
    """Of the tensors in what ``to_json`` has made, in order; raises TypeError for a name that is no text."""
    if isinstance(x, dict) and x.get(MARK) == "tensor":
        if not isinstance(x.get("name"), str):
            raise TypeError(f"{x.get('name')!r:.40} is no name of a tensor")
        yield x["name"]
    elif isinstance(x, (dict, list)):
        for held in x.values() if isinstance(x, dict) else x:
            yield from tensor_names(held)
