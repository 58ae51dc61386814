"""Layer, RMS, group and batch norm.  Dims over which statistics are taken stay whole."""

from __future__ import annotations

from functools import partial
from math import prod

from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import dim_of, overloads, put

# {n} stands for the dims of the normalized shape, {l} for as many of size one.
LINES = {
    "native_layer_norm": "~...{n},~{n},~{n}->...{n},...{l},...{l}",
    "native_layer_norm_backward": "...{n},~...{n},~...{l},~...{l},~{n},~{n}->...{n},{n}:0123,{n}:0",
    "_fused_rms_norm": "~...{n},~{n}->...{n},...{l}",
    "_fused_rms_norm_backward": "...{n},~...{n},~...{l},~{n}->...{n},{n}:012",
}


def _normalized(call: Call, line: str) -> str:
    count = len(call["normalized_shape"])
    return line.format(n="NMLKJ"[:count], l="1" * count)


for _name, _line in LINES.items():
    rule(overloads(_name), partial(_normalized, line=_line))


GROUP_SIZES = {
    "N": lambda i, o: i[0][0],
    "C": lambda i, o: i[0][1],
    "HxW": lambda i, o: prod(i[0][2:]),
}


GROUP_NORMS = {
    "native_group_norm": "~nC{space},~C,~C->nC{space},nG,nG",
    "native_group_norm_backward": "nC{space},~nC{space},~nG,~nG,~C->nC{space},C:0123,C:0",
}


def _of_groups(call: Call, line: str) -> str:
    return line.format(space="_" * (len(call.shape) - 2))


for _name, _line in GROUP_NORMS.items():
    rule(overloads(_name), partial(_of_groups, line=_line), sizes=GROUP_SIZES, nonempty=True)


def _batch(call: Call, training: bool) -> str:
    """Dims of the input: in training only channels are apart, in evaluation every element is."""
    letters = "hwdxyz"[: len(call.shape) - 2]
    return ("Nc" + letters.upper()) if training else ("nc" + letters)


def _batch_norm(call: Call, training: bool, outputs: int) -> str:
    x = _batch(call, training)
    tensors = sum("Tensor" in str(a.type) for a in call.op._schema.arguments)  # type: ignore[attr-defined]
    operands = ",".join([f"~{x}"] + ["~c"] * (tensors - 1))
    rest = ["c" if m is not None and m.shape == (call.shape[1],) else "_:" for m in call.outputs[1:outputs]]
    if outputs == 5 and not training:
        rest[2:] = ["c:3", "c:4"]  # the running statistics, as they were
    return f"{operands}->{','.join([x, *rest])}"


_evaluation, _update = (partial(_batch_norm, training=training, outputs=n) for training, n in ((False, 3), (True, 6)))
rule(overloads("_native_batch_norm_legit_no_training"), _evaluation, nonempty=True)
rule(overloads("_batch_norm_with_update_functional"), _update, nonempty=True)


BATCH_NORMS = "native_batch_norm _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional"


@rule(overloads(BATCH_NORMS), nonempty=True)
def batch_norm(call: Call) -> str:
    return _batch_norm(call, bool(call["training"]), len(call.outputs))


@rule(overloads("native_batch_norm_backward"), nonempty=True)
def batch_norm_backward(call: Call) -> str:
    """Operands: gradient, input, weight, running mean, running variance, saved mean, saved 1/deviation."""
    train = bool(call["train"])
    x = _batch(call, train)
    saved = call["save_mean"]
    save = "c" if train or (saved is not None and saved.shape == (call.shape[1],)) else "_"
    used = "0156" if train else "0134"
    return f"{x},~{x},~c,~c,~c,~{save},~{save}->{x},c:{used},c:0"


@rule(overloads("batch_norm_backward"), nonempty=True)
def batch_norm_with_update_backward(call: Call) -> str:
    """The rule of ``native_batch_norm_backward``, with a reserve at the end that only some devices use."""
    x = _batch(call, call["update"])
    used = "0156" if call["update"] else "0134"
    return f"{x},~{x},~c,~c,~c,~c,~c,~_->{x},c:{used},c:0"


@rule(overloads("renorm"))
def renorm(call: Call) -> str:
    """Each slice along ``dim`` is scaled by its own norm."""
    line = put(["_"] * len(call.shape), dim_of(call["dim"], len(call.shape)), "n")
    return f"~{line}->{line}"
