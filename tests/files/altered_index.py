"""An index altered by someone who means harm: at random places, with values that a careless reader would trip over."""

import copy
import hashlib
import json

ODD_VALUES = [
    None, True, False, 0, -1, 1, 2, 7, 10**18, 2**63, 2**64, 10**400, -(10**400), 0.5, 1e308, "", "x", "0" * 64, [],
    [[]], {}, [0] * 60, {"": "float", "value": "nan"}, {"": "float", "value": "inf"}, {"": "float", "value": "x"},
    {"": "int", "value": hex(10**400)}, {"": "tuple", "items": [0.9]}, {"": "tuple"}, {"": "dict", "items": [[[], 1]]},
    {"": "counter", "items": [["a", "b"]]}, {"": "ordered", "items": []}, {"": "tensor", "name": "nobody"},
    {"": "tensor", "name": 3}, {"": "bytes", "value": "zz"}, {"": "dtype", "value": "bits8"},
    {"": "complex", "value": "1j"}, {"": "device", "value": "cuda:99999"}, {"": []}, {"": "code"}, "bits8", "qint8",
    "uint4", "float64", "complex64", "rank-00000.safetensors", "../x", "index.json",
]  # fmt: skip


def write(path, body):
    """With the hash of an index that was saved."""
    body = {key: held for key, held in body.items() if key != "sha256"}
    text = json.dumps(body)
    path.write_text(json.dumps({**body, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


def altered(body, draw):
    """What was changed in it, and the changed one."""
    made = copy.deepcopy(body)
    holder, place = made, []
    while True:
        key = draw.choice([*holder] if isinstance(holder, dict) else range(len(holder)))
        place.append(key)
        if not isinstance(holder[key], (dict, list)) or not holder[key] or draw.random() < 0.1:
            break
        holder = holder[key]
    how = draw.randrange(8)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[draw.choice(["", "x", "lr", "_step_count", "_initial_step", "same as", "sha256", "pieces"])] = (
            holder.pop(key)
        )
    elif how == 2 and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    elif how == 3 and type(holder[key]) is int:
        holder[key] = max(0, holder[key] + draw.choice([-1, 1, 8, 2**40]))
    else:
        holder[key] = copy.deepcopy(draw.choice(ODD_VALUES))
    return (
        f"{how} at {'.'.join(map(str, place))}: {holder.get(key) if isinstance(holder, dict) else holder!r:.80}",
        made,
    )
