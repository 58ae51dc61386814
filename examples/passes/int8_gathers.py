"""Parameters are gathered as int8 with a scale for each block, and made wide again where they are read.

ZeRO++ calls it qwZ (quantised weights, arXiv 2306.10209, section 3.1): half of the bytes of a 16-bit gather, a quarter
of a float32 one, plus a scale for every block.  Each block of ``block`` numbers of a row has a scale of its own, its
largest magnitude / 127, so a number is read within half its block's scale; the parameter that the optimizer steps stays
as it is.  Rows are what ranks split, so what is read does not depend on how many ranks there are.

Contract: runs after ``zero``, or after ``cast_before_gather`` where parameters are read in 16 bit.  What forward and
backward read of a parameter that is split along its rows is its int8 form, quantised once where it lies and gathered by
each.
This changes values, within that bound: it is the step of the model whose weights are the numbers that int8 can say.
Left alone: vectors, parameters that are whole, or split along another dim.

      w       = param()                      : f32[16, 8]  S(0)!
    forward:
    - wf      = use(w)                       : f32[16, 8]  B!
    + w_int8  = int8_blocks(w, 4)            : (i8[16, 8], f32[16, 2])
    + w_q     = w_int8[0]                    : i8[16, 8]   ; param(w)
    + w_scale = w_int8[1]                    : f32[16, 2]  ; param(w)
    + use     = use(w_q)                     : i8[16, 8]   B!
    + use_1   = use(w_scale)                 : f32[16, 2]  B!
    + wf_wide = from_int8(use, use_1, 4, torch.float32)  : f32[16, 8]
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.nn import functional as F

import graphzero as gz
from graphzero.ir import ops, value


@torch.library.custom_op("examples::int8_blocks", mutates_args=())
def int8_blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """x [rows, ...] as int8 of its shape, and scales [rows, blocks of a row]: ``int8 * scale`` is x, within scale/2."""
    rows = x.flatten(1).float()
    cut = F.pad(rows, (0, -rows.shape[1] % block)).unflatten(1, (-1, block))
    scale = cut.abs().amax(2) / 127
    numbers = (cut / scale.where(scale > 0, 1.0).unsqueeze(2)).round()
    return numbers.flatten(1)[:, : rows.shape[1]].to(torch.int8).reshape(x.shape), scale


@torch.library.custom_op("examples::from_int8", mutates_args=())
def from_int8(numbers: Tensor, scale: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    rows = numbers.flatten(1)
    return (rows * scale.repeat_interleave(block, 1)[:, : rows.shape[1]]).to(dtype).reshape(numbers.shape)


def scales_of(x: Tensor, block: int) -> Tensor:
    return x.new_empty(x.shape[0], -(-x[0].numel() // block), dtype=torch.float32)


int8_blocks.register_fake(lambda x, block: (torch.empty_like(x, dtype=torch.int8), scales_of(x, block)))
from_int8.register_fake(lambda numbers, scale, block, dtype: torch.empty_like(numbers, dtype=dtype))


@gz.sbp.rule(int8_blocks)
def int8_blocks_rule(call: gz.sbp.Call) -> str:
    rest = "BCDEFGH"[: len(call.shape) - 1]  # whole, as blocks run along it
    return f"~a{rest}->a{rest},a_"


@gz.sbp.rule(from_int8)
def from_int8_rule(call: gz.sbp.Call) -> str:
    rest = "BCDEFGH"[: len(call.shape) - 1]
    return f"~a{rest},~a_->a{rest}"


@dataclass(frozen=True)
class Int8Gathers:
    """Gathers parameters as int8.  block: numbers of a row that share a scale."""

    block: int = 256

    def __call__(self, graph: gz.StepGraph) -> gz.StepGraph:
        params = {value.role_of(param): value.nd_of(param) for param in graph.placeholders("param")}
        quantised_params: dict[object, tuple[fx.Node, fx.Node]] = {}
        for use in list(graph.graph.find_nodes(op="call_function", target=ops.use)):
            source = use.args[0]
            role, type_ = value.role_of(source), value.tensor_type(use)
            cuts = {sbp.dim for sbp in params.get(role, ()) if sbp.is_split}
            is_copy = any(reader.target is ops.use for reader in use.users)  # phases read by uses of their own
            if value.phase_of(use) == "update" or cuts != {0} or len(type_.shape) < 2 or is_copy:
                continue
            with graph.graph.inserting_before(use):
                if (role, type_) not in quantised_params:
                    quantised_params[role, type_] = self.quantised(graph, use)
                read = [self.read_as(graph, use, part) for part in quantised_params[role, type_]]
                args = (*read, self.block, type_.dtype)
                wide = graph.call(torch.ops.examples.from_int8.default, args, type_, like=use, name=f"{use.name}_wide")
            use.replace_all_uses_with(wide)
            graph.graph.erase_node(use)
        return graph

    def quantised(self, graph: gz.StepGraph, use: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The int8 form of what a use reads, and its scales."""
        source, shape = use.args[0], value.tensor_type(use).shape
        blocks = -(-torch.Size(shape[1:]).numel() // self.block)
        types = value.TensorType(torch.int8, shape), value.TensorType(torch.float32, (shape[0], blocks))
        op, name = torch.ops.examples.int8_blocks.default, f"{source.name}_int8"
        both = graph.call(op, (source, self.block), types, like=use, name=name)
        names = f"{source.name}_q", f"{source.name}_scale"
        parts = [graph.call(operator.getitem, (both, i), types[i], like=use, name=names[i]) for i in range(2)]
        for part in parts:
            graph.set_role(part, value.role_of(source))
        return parts[0], parts[1]

    def read_as(self, graph: gz.StepGraph, use: fx.Node, part: fx.Node) -> fx.Node:
        """A use of a part of the int8 form, in the SBP in which ``use`` reads the parameter."""
        read = graph.call(ops.use, (part,), value.type_of(part), like=use)
        for axis, sbp in zip(graph.placement.names, value.nd_of(use), strict=True):
            graph.pin(read, axis, sbp)
        return read
