"""Passes of the user's own that break a law: the error names the pass, the value and the next step."""

import functools

import numpy as np
import pytest
import torch
from graphs import TrainGraph, mean_square
from wrong import X, Y, make, refused, says

import graphzero as gz
from graphzero.ir import value
from graphzero.sbp.types import B, P, S

ATEN = torch.ops.aten


def using(pass_, after="zero"):
    graph = make()
    graph.config.add_pass(pass_, after=after)
    return graph


def nonlinear(graph):
    return next(node for node in graph.nodes if "softmax" in str(node.target))


def returns_nothing(graph):
    pass


def returns_a_module(graph):
    return graph.fx


def drops_an_update(graph):
    outputs, aux, updates = graph.output.args[0]
    graph.output.args = ((outputs, aux, {name: updates[name] for name in list(updates)[1:]}),)
    return graph


def drops_an_input(graph):
    first, second = list(graph.placeholders())[:2]
    first.replace_all_uses_with(second)
    graph.graph.erase_node(first)
    return graph


def adds_an_input(graph):
    first = next(iter(graph.placeholders()))
    with graph.graph.inserting_before(first):
        graph.graph.placeholder("extra").meta = dict(first.meta)
    return graph


@functools.cache
def another():
    return make().compile(X, Y).program


def returns_another_graph(graph):
    return another()


def makes_an_untyped_value(graph):
    with graph.graph.inserting_after(graph.outputs[0]):
        graph.graph.call_function(torch.ops.aten.relu.default, (graph.outputs[0],))
    return graph


def breaks_the_order(graph):
    calls = [node for node in graph.nodes if node.op == "call_function"]
    calls[-1].append(calls[0])
    return graph


def pins_a_stranger(graph):
    graph.pin("stranger", "dp", B)
    return graph


def pins_on_a_strange_axis(graph):
    graph.pin(graph.outputs[0].name, "tp", B)
    return graph


def pins_a_strange_dim(graph):
    graph.pin(graph.outputs[0].name, "dp", S(7))
    return graph


def pins_a_text(graph):
    graph.pin(graph.outputs[0].name, "dp", "B")
    return graph


def instead(graph, target, *args, type_=None, **kwargs):
    """The graph in which an op on what build returns is returned in its place."""
    old = graph.outputs[0]
    with graph.graph.inserting_after(old):
        new = graph.call(target, (old, *args), type_ or value.type_of(old), like=old, kwargs=kwargs)
    graph.set_output([new, *graph.outputs[1:]], graph.aux, graph.updates)
    return graph


def states_another_dtype(graph):
    return instead(graph, ATEN.mul.Tensor, 2, type_=value.TensorType(torch.float16, ()))


def calls_a_function(graph):
    return instead(graph, torch.relu)


def writes_over_an_operand(graph):
    return instead(graph, ATEN.mul_.Tensor, 2)


def draws_by_itself(graph):
    return instead(graph, ATEN.rand_like.default)


def writes_in_a_place_too_early(graph):
    return instead(graph, ATEN.mul.Tensor, 2, out=graph.outputs[0])


def takes_a_number_of_numpy(graph):
    return instead(graph, ATEN.mul.Tensor, np.float64(2))


def says_a_role_in_words(graph):
    graph.outputs[0].meta["role"] = "loss"
    return graph


def says_a_phase_that_there_is_not(graph):
    graph.outputs[0].meta["phase"] = "clip"
    return graph


def calls_a_value_of_forward_one_of_the_update(graph):
    value.operand(graph.outputs[0]).meta["phase"] = "update"
    return graph


def makes_an_input_another(graph):
    param = next(graph.placeholders("param"))
    graph.set_role(param, value.Role("buffer", value.role_of(param).of))
    return graph


def goes_to_other_ranks(graph):
    graph.placement = gz.placement("cpu", range(2), names=("tp",), virtual=True)
    return graph


def returns_a_number_beside(graph):
    graph.set_output(graph.outputs, {"mine": 3}, graph.updates)
    return graph


def returns_two_values_for_three_parts(graph):
    graph.output.args = graph.outputs
    return graph


def returns_twice(graph):
    graph.graph.output(graph.output.args[0])
    return graph


def sets_no_output(graph):
    graph.set_output(None, graph.aux, graph.updates)
    return graph


def takes_the_fx_graph_away(graph):
    graph.graph = None
    return graph


def names_two_values_alike(graph):
    nonlinear(graph).name = graph.outputs[0].name
    return graph


def names_a_value_in_words(graph):
    nonlinear(graph).name = "log softmax"
    return graph


def calls_with_a_value_for_a_tuple(graph):
    old = graph.outputs[0]
    with graph.graph.inserting_after(old):
        graph.call(ATEN.relu.default, old, value.type_of(old), like=old)
    return graph


def forgets_a_type(graph):
    nonlinear(graph).meta["type"] = None
    return graph


def splits_on_two_axes_of_one(graph):
    nonlinear(graph).meta["sbp"] = (B, B)
    return graph


def pins_without_an_sbp(graph):
    next(graph.placeholders("param")).meta["sbp"] = None
    return graph


def pins_in_words(graph):
    next(graph.placeholders("param")).meta["pins"] = "dp"
    return graph


def repeats_in_words(graph):
    nonlinear(graph).meta["repeat"] = "twice"
    return graph


def pins_nothing(graph):
    graph.pin(None, "dp", B)
    return graph


def pins_a_value_of_another_graph(graph):
    graph.pin(nonlinear(graph.clone()), "dp", B)
    return graph


BROKEN = [
    (returns_nothing, gz.VerifyError, "returned NoneType", "returns it"),
    (returns_a_module, gz.VerifyError, "not a StepGraph"),
    (drops_an_update, gz.VerifyError, "dropped the update of model_weight", "graph.set_output"),
    (drops_an_input, gz.VerifyError, "dropped the input x", "Leave unused placeholders"),
    (adds_an_input, gz.VerifyError, "added the input extra"),
    (returns_another_graph, gz.VerifyError, "from level 'captured' to 'local'", "not another one"),
    (makes_an_untyped_value, gz.VerifyError, "has no type", "graph.call"),
    (breaks_the_order, gz.VerifyError, "not made above it", "inserting_before"),
    (states_another_dtype, gz.VerifyError, "is said to be f16[], but is f32[]", "graph.call"),
    (calls_a_function, gz.VerifyError, "which is a function of Python"),
    (writes_over_an_operand, gz.VerifyError, "calls mul_, which writes over an operand"),
    (draws_by_itself, gz.VerifyError, "draws from torch's own generator"),
    (writes_in_a_place_too_early, gz.VerifyError, "is told where to write at level captured"),
    (takes_a_number_of_numpy, gz.VerifyError, "an argument of type float64"),
    (says_a_role_in_words, gz.VerifyError, "has 'loss' for a role"),
    (says_a_phase_that_there_is_not, gz.VerifyError, "has 'clip' for a phase", "forward, backward, update"),
    (calls_a_value_of_forward_one_of_the_update, gz.VerifyError, "is of the phase forward", "of update, which follows"),
    (makes_an_input_another, gz.VerifyError, "buffer(model.weight)", "which was param(model.weight)"),
    (goes_to_other_ranks, gz.VerifyError, 'names=("tp",)', "Leave graph.placement"),
    (returns_a_number_beside, gz.VerifyError, "would hand out 3", "graph.set_output"),
    (
        returns_two_values_for_three_parts,
        gz.VerifyError,
        "has the graph return",
        "graph.set_output(outputs, aux, updates)",
    ),
    (returns_twice, gz.VerifyError, "is a output node"),
    (sets_no_output, gz.VerifyError, "graph.set_output(None", "a list of values"),
    (takes_the_fx_graph_away, gz.VerifyError, "set graph.graph to None"),
    (names_two_values_alike, gz.VerifyError, "is the name of two nodes"),
    (names_a_value_in_words, gz.VerifyError, "'log softmax' is not a name"),
    (calls_with_a_value_for_a_tuple, gz.VerifyError, "for its arguments, which are a tuple"),
    (forgets_a_type, gz.VerifyError, "has None for a type"),
    (splits_on_two_axes_of_one, gz.VerifyError, "has (B, B) for an SBP", "for each axis, dp"),
    (pins_without_an_sbp, gz.VerifyError, "is pinned, and its SBP is None", "graph.pin(value, axis, sbp)"),
    (pins_in_words, gz.VerifyError, "has 'dp' for pins"),
    (repeats_in_words, gz.VerifyError, "has 'twice' for its repeat, which is of type int"),
    (pins_nothing, gz.SbpError, "cannot pin None", "one of its values"),
    (pins_a_value_of_another_graph, gz.SbpError, "cannot pin", "one of its values"),
    (pins_a_stranger, gz.VerifyError, "no value named 'stranger'", "print(graph)"),
    (pins_on_a_strange_axis, gz.PlacementError, "'tp'", "dp"),
    (pins_a_strange_dim, gz.SbpError, "S(7)", "pin it to B"),
    (pins_a_text, gz.SbpError, "'B'", "gz.sbp.B"),
]


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case[0].__name__)
def test_a_pass_that_breaks_a_law_is_refused(case):
    pass_, kind, *words = case
    another()  # ahead: no Graph is compiled within the compilation of one
    message = refused(using(pass_), kind, *words)
    assert pass_.__name__ in message or pass_.__name__.startswith(("pins", "sets"))


@pytest.mark.parametrize("after", ["assign_stages", "localize"])
@pytest.mark.parametrize("stage", [1, 7, None])
def test_a_pass_that_moves_an_input_to_another_stage_is_refused(stage, after):
    def moves(graph):
        next(graph.placeholders("param")).meta["stage"] = stage
        return graph

    def leaves_out(graph):
        del next(graph.placeholders("param")).meta["stage"]
        return graph

    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    ranks = gz.placement("cpu", range(2), names=("pp",), virtual=True)
    graph = TrainGraph(layers, mean_square, torch.optim.SGD(layers.parameters(), lr=0.1), placement=ranks)
    for number, layer in enumerate(layers):
        graph.config.set_stage(layer, number)
    graph.config.add_pass(moves if stage else leaves_out, after=after)
    with says(gz.VerifyError, f"took the input 'model_0_weight' from pipeline stage 0 to {stage}", "config.set_stage"):
        graph(torch.ones(2, 4))


@pytest.mark.parametrize("after", ["propagate", "insert_boxing", "lower_boxing", "localize", "bucket", "dead_code"])
def test_a_partial_sum_in_a_nonlinear_op_is_refused_wherever_the_pass_stands(after):
    def leaves_a_partial_sum(graph):
        nonlinear(graph).meta["sbp"] = (P,)
        return graph

    graph = using(leaves_a_partial_sum, after)
    refused(graph, gz.VerifyError, "after pass leaves_a_partial_sum", "_log_softmax", "S(0) -> S(0)", "wrong.py:")


@pytest.mark.parametrize("after", ["insert_boxing", "localize"])
def test_a_partial_sum_in_a_state_or_an_output_is_refused(after):
    def partial_state(graph):
        next(iter(graph.updates.values())).meta["sbp"] = (P,)
        return graph

    def partial_output(graph):
        graph.outputs[0].meta["sbp"] = (P,)
        return graph

    refused(using(partial_state, after), gz.VerifyError, "after pass partial_state")
    refused(using(partial_output, after), gz.VerifyError, "after pass partial_output")


def test_sizes_of_the_whole_are_refused_where_sizes_are_those_of_a_rank():
    def counts_each_row_twice(graph):
        rows = nonlinear(graph)
        with graph.graph.inserting_after(rows):
            sizes = list(value.tensor_type(rows).shape)
            graph.call(ATEN.full.default, (sizes, 1.0), value.type_of(rows), sbp=value.nd_of(rows), like=rows)
        return graph

    refused(using(counts_each_row_twice, "localize"), gz.VerifyError, "is not what a rank calls for its piece", "/dp")
    using(counts_each_row_twice, "lower_boxing")(X, Y)


def test_what_a_pass_raises_stays_visible_with_the_name_of_the_pass():
    def raises(graph):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        using(raises)(X, Y)
    assert "in pass raises" in "\n".join(getattr(caught.value, "__notes__", ["in pass raises"]))


class Nameless:
    def __call__(self, graph):
        return graph


@pytest.mark.parametrize(
    ("pass_", "after", "words"),
    [
        ("zero", "zero", ("'zero'", "callable")),
        (None, "zero", ("None", "callable")),
        (gz.passes.DeadCode, "zero", ("that is a class", "DeadCode()")),
        (lambda: None, "zero", ("one argument",)),
        (lambda graph, more: graph, "zero", ("one argument", "functools.partial")),
        (Nameless(), "unknown", ("nameless", "after='unknown'", "'insert_boxing'")),
        (Nameless(), None, ("after=None", "'insert_boxing'")),
    ],
)
def test_what_is_no_pass_or_has_no_place_is_refused_where_it_is_added(pass_, after, words):
    with says(gz.ConfigError, *words):
        using(pass_, after)


def test_passes_without_a_name_and_passes_added_twice_run():
    graph = make()
    twice = Nameless()
    for pass_, after in (
        (twice, "zero"), (twice, "nameless"), (functools.partial(lambda keep, g: g, True), "zero"),
        (gz.passes.DeadCode(), "localize"),
    ):  # fmt: skip
        graph.config.add_pass(pass_, after=after)
    graph(X, Y)
    names = [record.name for record in graph.history]
    assert names.count("nameless") == 2 and names.count("partial") == 1 and names.count("dead_code") == 2
