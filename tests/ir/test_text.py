"""A graph's text is all there is to it: it reads back, and says which line does not."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
import time

import pytest
import torch
from toys import STAGES, history, lower, run, step

from graphzero.ir.graph import StepGraph
from graphzero.ir.text.parser import ParseError, parse
from graphzero.ir.text.printer import op_name, print_graph
from graphzero.ir.value import Role, TensorType
from graphzero.ir.verifier.verify import verify
from graphzero.sbp.placement import placement
from graphzero.sbp.shards import LocalSize, LocalStart
from graphzero.sbp.types import B, S

TOYS = {
    "mlp": step(("linear 12", "bias", "relu", "linear 3", "bias")),
    "norm and split": step(("linear 6", "norm", "split", "linear 3"), optimizer="momentum"),
    "tied, scaled, uneven": step(("linear 7", "relu", "tied", "scale", "linear 3"), ranks=3, batch=6, optimizer="rows"),
}

SCALARS = """
graph scalars(dp=2) captured
  x   = batch()                             : f32[8, 4]  S(0)!
  m   = constant(0)                         : bool[8, 4]
  key = seed()                              : i64[]
  lr  = hyper(optimizer0.group0, lr)        : float
  b2  = hyper(optimizer0.group0, betas.1)   : float
  c   = scalar()                            : float
  n   = buffer(model.bn.num_batches)        : i64[]
forward:
  c2  = operator.mul(c, lr)                 : float
  c3  = math.sqrt(c2)                       : float
  u   = uniform_like(x, key, 3, [0, 0], [8, 4]) : f32[8, 4]
  k   = lt.Scalar(u, 0.5)                   : bool[8, 4]
  y   = mul(x, c3)                          : f32[8, 4]
  z   = where.self(k, y, x)                 : f32[8, 4]  ; loss()
update:
  n1  = add(n, 1)                           : i64[]
  return z, 3, None, True, 'a; b'; grad_norm.0=y; update(n=n1)
"""


HYBRID = """
graph hybrid(dp=2, tp=2) captured
  x  = batch()      : f32[8, 4]  (S(0)!, B!)
  w  = param(a.w)   : f32[4, 6]  (B!, S(1)!)
forward:
  wf = use(w)       : f32[4, 6]  (B!, ?)
  y  = mm(x, wf)    : f32[8, 6]
  s  = split(y, 3, 1) : (f32[8, 3]  (S(0), B), _)
  a  = s[0]         : f32[8, 3]  (P(max), P)
  return a
"""


def one(line: str, returned: str = "y") -> str:
    return f"graph g(dp=2) captured\n  x = batch() : f32[8, 4]\nforward:\n  {line}\n  return {returned}\n"


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def facts(graph: StepGraph) -> list[object]:
    return [(n.name, n.op, n.target, str(n.args), str(n.kwargs), sorted(n.meta.items(), key=str)) for n in graph.nodes]


def test_a_text_may_state_its_format_and_one_of_another_format_is_refused():
    text = str(parse(SCALARS))
    assert str(parse(f"# a report\n\nformat 1\n\n{text}")) == text
    with pytest.raises(
        ParseError, match=r"line 1 .*reads programs of format 1, and this one is of format 2; read it with"
    ):
        parse(f"format 2\n{text}")
    with pytest.raises(ParseError, match="line 2 of the graph: expected `graph name"):
        parse("format 1")


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("name", TOYS)
def test_every_graph_of_every_pass_reads_back_as_it_prints(name: str, zero: object) -> None:
    for record in history(TOYS[name], zero).values():  # type: ignore[arg-type]
        text = str(record.after)
        again = parse(text)
        assert str(again) == text
        assert again.level == record.after.level


@pytest.mark.parametrize("text", [SCALARS, HYBRID])
def test_what_is_read_is_what_stands_there(text: str) -> None:
    assert squeezed(str(parse(text))) == squeezed(text)


def test_types_sbps_pins_roles_and_phases_survive() -> None:
    for text in (SCALARS, HYBRID, TOYS["mlp"]):
        graph = parse(text)
        assert facts(parse(str(graph))) == facts(graph)


def test_roles_are_those_that_capture_gives() -> None:
    graph = parse(SCALARS)
    roles = {node.name: node.meta["role"] for node in graph.placeholders()}
    assert roles["key"] == Role("seed")
    assert roles["b2"] == Role("hyper", "optimizer0.group0", "betas.1")
    assert roles["c"] == Role("scalar", "c")
    assert graph.node("z").meta["role"] == Role("loss")
    spaced = parse("graph g(dp=2)\n  a = batch('my input') : f32[2]\n  return a\n")
    assert spaced.node("a").meta["role"] == Role("batch", "my input")
    assert "batch('my input')" in str(spaced)


def test_parsed_graphs_rewrite_and_run_as_their_originals() -> None:
    for zero in STAGES:
        graph = parse(TOYS["mlp"])
        for first, second in ((graph, parse(str(graph))), (lower(graph, zero), parse(str(lower(graph, zero))))):
            if first.level == "captured":
                first, second = lower(first, zero), lower(second, zero)
            assert str(first) == str(second)
            for a, b in zip(run(first).values(), run(second).values(), strict=True):
                assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        "clamp(x, None, 1.0)",
        "clamp(x, -inf, nan)",
        "clamp(x, -1, 1e-300)",
        "div.Tensor_mode(x, 2, rounding_mode='floor')",
        "gelu(x, approximate='it is : , ; ) here')",
        "_to_copy(x, dtype=torch.bfloat16)",
        "new_zeros(x, [8, 4], dtype=torch.float32, layout=torch.strided, pin_memory=False)",
        "full([8, 4], True, dtype=torch.bool, device=device(type='cpu'))",
        "full([8, 4], 1, device=device(type='cuda', index=1))",
        "empty_like(x, memory_format=torch.contiguous_format)",
        "cat([x, x], 0)",
        "index([x], [None, [x, -1], (x,), ()])",
        "constant_pad_nd(x, [0, 0], -0.0)",
        "mul(x, (1+2j))",
        "view(x, [8/dp, 4])",
        "uniform_like(x, x, 0, [8@dp, 0], [8, 4])",
        "operator.add(x, -2)",
    ],
)
def test_arguments_of_every_kind_read_back(call: str) -> None:
    text = one(f"y = {call} : f32[8, 4]")
    assert squeezed(str(parse(text))) == squeezed(text)


def test_arguments_keep_their_python_types() -> None:
    text = one("y = clamp(x, [1, 1.0, True, None, 'a'], -inf, dtype=torch.bfloat16, size=[8/dp, 8@dp]) : f32[8, 4]")
    node = parse(text).node("y")
    assert list(map(type, node.args[1])) == [int, float, bool, type(None), str]  # type: ignore[arg-type]
    assert node.args[2] == -math.inf
    assert node.kwargs["dtype"] is torch.bfloat16
    assert node.kwargs["size"] == [LocalSize(8, "dp"), LocalStart(8, "dp")]


def test_spaces_comments_and_line_ends_are_free() -> None:
    plain = parse(one("y = relu(x) : f32[8, 4]  S(0)"))
    loose = "# a note\n\ngraph  g( dp = 2 )   captured\n x   =  batch()  :   f32[8,4]\n\nforward:\n# more\n"
    loose += "\ty = relu( x )\t:  f32[ 8 , 4 ] S(0)\n return y\n\n"
    assert str(parse(loose)) == str(plain)
    assert str(parse(str(plain).replace("\n", "\r\n"))) == str(plain)


def test_a_graph_may_be_called_anything() -> None:
    graph = parse(one("y = relu(x) : f32[8, 4]"))
    graph.name = "my (second) graph-1"
    assert str(parse(str(graph))) == str(graph)


def test_values_may_begin_with_the_word_return() -> None:
    text = one("return_value = relu(x) : f32[8, 4]", "return_value")
    assert squeezed(str(parse(text))) == squeezed(text)


@pytest.mark.parametrize("stage", STAGES)
def test_a_program_is_copied_and_pickled(stage) -> None:
    program = lower(TOYS["tied, scaled, uneven"], stage)
    for copied in (copy.copy(program), copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert str(copied) == str(program) and copied.placement == program.placement
        assert set(copied.nodes).isdisjoint(program.nodes)
        verify(copied)


@pytest.mark.parametrize("name", ["max", "sum", "input", "inf", "torch", "None", "lambda"])
def test_names_that_torch_or_python_keep_are_refused(name: str) -> None:
    with pytest.raises(ParseError, match=f"cannot be called {name}.*write {name}_1"):
        parse(one(f"{name} = relu(x) : f32[8, 4]", name))
    with pytest.raises(ParseError, match=f"line 2 .*cannot be called {name}"):
        parse(f"graph g(dp=2)\n  {name} = batch() : f32[2]\n  return {name}\n")


def test_names_that_only_look_kept_are_names() -> None:
    for name in ("max_1", "add", "relu", "node", "_", "x_1", "X", "dW", "update", "forward"):
        text = one(f"{name} = relu(x) : f32[8, 4]", name)
        assert squeezed(str(parse(text))) == squeezed(text)
        assert name in [node.name for node in parse(text).clone().nodes]


NAMES = (
    "a : b",
    "it's",
    'say "a"',
    "two\nlines",
    "a; b",
    "a -> b",
    "f(x)",
    "x, y",
    "\u2028 \x85 é",
    "a\\",
    " ",
    "#",
    "S(0)!",
)


@pytest.mark.parametrize("name", NAMES)
def test_paths_and_graphs_may_have_any_name(name: str) -> None:
    graph = parse(SCALARS)
    graph.name = name
    graph.node("m").meta["role"] = Role("constant", name)
    graph.node("lr").meta["role"] = Role("hyper", name, name)
    graph.node("z").meta["role"] = Role("gradient", name)
    again = parse(str(graph))
    assert (again.name, str(again)) == (name, str(graph))
    assert [again.node(at).meta["role"] for at in ("m", "lr", "z")] == [
        Role("constant", name), Role("hyper", name, name), Role("gradient", name)
    ]  # fmt: skip


BAD_LINES = {
    "y = foo(x) : f32[8, 4]": "no op is called foo",
    "y = mm.wrong(x) : f32[8, 4]": "no op is called mm.wrong",
    "y = nowhere.at.all(x) : f32[8, 4]": "no op is called nowhere.at.all",
    "y = batch() : f32[8, 4]": "no op is called batch",
    "y = relu(z) : f32[8, 4]": "z is not defined above this line",
    "y = x[z] : f32[8, 4]": "z is not defined above this line",
    "x = relu(x) : f32[8, 4]": "x is defined twice",
    "y = relu(x) : f32[8, four]": "expected a type such as",
    "y = relu(x) : f32[8 4]": "expected a type such as",
    "y = relu(x) : f32": "expected a type such as",
    "y = relu(x) : q7[8, 4]": "'q7' is not a dtype; f64, f32",
    "y = relu(x) : f32[8, 4]  S(a)": "'S\\(a\\)' is not an SBP",
    "y = relu(x) : f32[8, 4]  B!!": "'B!' is not an SBP",
    "y = relu(x) : f32[8, 4]  P(mean)": "one of sum, max, min",
    "y = relu(x) : f32[8, 4]  (B, B)": "expected one SBP for each axis",
    "y = relu(x) : (f32[8, 4], _": "types of several results in brackets",
    "y = relu(x) : (f32[8, 4]  B!, _)": "pin the value that picks one",
    "y = relu(x)": "expected `name = op",
    "y = x : f32[8, 4]": "not a call of an op",
    "y = relu(x : f32[8, 4]": "not a call",
    "y = relu(x + 1) : f32[8, 4]": "cannot read the argument 'x \\+ 1'",
    "y = relu(*x) : f32[8, 4]": "cannot read the argument",
    "y = view(x, [8/tp, 4]) : f32[8, 4]": "no axis is called tp; the graph's are dp",
    "y = relu(x) : f32[8, 4]  ; gradient": "expected `kind\\(path\\)`",
    "y = relu(x) : f32[8, 4]  ; state(a, b, c)": "expected `kind\\(path\\)`",
    "y = relu(x) : f32[8, 4]  ; thing(a)": "no role is called thing; one of batch",
    "y = operator.methodcaller('system', 'true') : f32[8, 4]": "no op is called operator.methodcaller",
    "y = operator.attrgetter('x') : f32[8, 4]": "no op is called operator.attrgetter",
    "y = math.factorial(100000) : int": "no op is called math.factorial",
    "y = from_file('/etc/hostname') : f32[8, 4]": "from_file has effects beyond tensors",
    "y = aten._print.default('a') : f32[8, 4]": "does not make tensors",
    "y = relu_(x) : f32[8, 4]": "relu_ writes over an operand",
    "y = adam_([x], [x], [x], [x], [], [x], 0.1, 0.9, 0.9, 0.1, 0.1) : f32[8, 4]": "adam_ writes over an operand",
    "y = rand([8, 4]) : f32[8, 4]": "rand draws from torch's own generator",
    "y = equal(x, x) : bool": "equal does not make tensors",
    "y = _c10d_functional.wait_tensor.default(x) : f32[8, 4]": "is a custom op; give it a rule with gz.sbp.rule",
    "y = inductor._reinterpret_tensor.default(x, [8], [1], 99) : f32[8]": "is a custom op",
    "y = ops.load_library('a') : f32[8, 4]": "no op is called ops.load_library",
    "y = load_library.a.b(x) : f32[8, 4]": "no op is called load_library.a.b",
    "y = mul(x, torch.os) : f32[8, 4]": "dtypes, layouts and memory formats",
    "y = mul(x, torch.ops.aten) : f32[8, 4]": "dtypes, layouts and memory formats",
    "y = mul(x, torch.load('a')) : f32[8, 4]": "dtypes, layouts and memory formats",
    "y = full([8, 4], 1, device=device(type='meta')) : f32[8, 4]": "a device is",
    "y = mul(x, 9223372036854775808) : f32[8, 4]": "beyond what 64 bits hold",
    "y = mul(x, b'a') : f32[8, 4]": "b is not defined above this line",
    "y = mul(x, x'a') : f32[8, 4]": "cannot read the argument",
    "y = mul(x, ...) : f32[8, 4]": "cannot read the argument",
    "y = mul(x, '\\N{DIGIT ONE}') : f32[8, 4]": "not a text as repr writes it",
    "y = mul(x, 1 2) : f32[8, 4]": "cannot read the argument '1 2'",
    "y = mul(x, 8/dp/dp) : f32[8, 4]": "axis dp cuts a size once",
    "y = mul(x, other=x, other=x) : f32[8, 4]": "the argument other occurs twice",
    "y = relu(x) : f32[1125899906842625]": "up to 64 dims and 2\\*\\*50 bytes",
    "y = relu(x) : f32[8, 4]  S(65)": "not an SBP of up to 64 dims",
    "y = relu(x) : tensor[8, 4]": "'tensor' is not a dtype",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_that_cannot_be_read_is_named_and_shown(line: str) -> None:
    with pytest.raises(ParseError, match=BAD_LINES[line]) as caught:
        parse(one(line))
    assert str(caught.value).startswith("line 4 of the graph: ")
    assert str(caught.value).endswith(f"\n  > {line}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1 of the graph: expected `graph name"),
        ("grap g(dp=2)\n  return", "line 1 of the graph: expected `graph name"),
        ("graph g()\n  return", "line 1 of the graph: expected `graph name"),
        ("graph g(dp)\n  return", "line 1 of the graph: expected `graph name"),
        ("graph g(dp=two)\n  return", "line 1 of the graph: expected `graph name"),
        ("graph g(dp=0)\n  return", "line 1 of the graph: no ranks"),
        ("graph g(dp=2, dp=2)\n  return", "line 1 of the graph: an axis name occurs twice"),
        ("graph g(dp=2) cooked\n  return", "line 1 of the graph: 'cooked' is not a level; one of captured"),
        ("graph g(dp=2000000000)\n  return", "line 1 of the graph: a text places on up to 131072 ranks"),
        ("graph g(a=1, b=1, c=1, d=1, e=1, f=1, g=1, h=1, i=1)\n  return", "up to 131072 ranks in up to 8 axes"),
        ("# only a note", "expected `graph name"),
        ("graph g(dp=2)\n  x = batch() : f32[2]", "line 2 of the graph: a graph ends in a line `return"),
        ("graph g(dp=2)\n  x = relu() : f32[2]\n  return x", "line 2 of the graph: inputs are batch, param"),
        (one("y = relu(x) : f32[2]", "q"), "line 5 of the graph: q is not defined"),
        (one("y = relu(x) : f32[2]", "y; update(x=q)"), "line 5 of the graph: 'x=q': q is not defined"),
        (one("y = relu(x) : f32[2]", "y; grad_norm.0=q"), "line 5 of the graph: .*q is not defined"),
        (one("y = relu(x) : f32[2]", "y +"), "line 5 of the graph: 'y \\+' is not a value"),
        (one("y = relu(x) : f32[2]") + "  z = relu(x) : f32[2]", "line 5 of the graph: .* ends with what it returns"),
        (one("y = relu(x) : f32[2]\ninput:\n  z = batch() : f32[2]"), "line 5 of the graph: inputs come first"),
    ],
)
def test_a_text_that_is_no_graph_says_why(text: str, problem: str) -> None:
    with pytest.raises(ParseError, match=problem):
        parse(text)


LONG = {
    "a header of commas": "graph g(" + "dp=2," * 300_000,
    "a header of digits": "graph g(dp=" + "9" * 2_000_000 + ")",
    "a header of words": "graph " + "g" * 2_000_000 + " (" * 100_000,
    "brackets": one(f"y = relu({'(' * 200_000}) : f32[8, 4]"),
    "lists": one(f"y = relu({'[' * 200_000}{']' * 200_000}) : f32[8, 4]"),
    "signs": one(f"y = relu({'-' * 500_000}1) : f32[8, 4]"),
    "a chain of names": one(f"y = {'a.' * 300_000}b(x) : f32[8, 4]"),
    "cuts": one(f"y = view(x, [8{'/dp' * 100_000}]) : f32[8, 4]"),
    "digits": one(f"y = mul(x, {'1' * 1_000_000}) : f32[8, 4]"),
    "an exponent": one(f"y = mul(x, 1e{'9' * 1_000_000}) : f32[8, 4]"),
    "spaces in a type": one(f"y = relu(x) : f32[8,{' ' * 1_000_000}four]"),
    "spaces in a line": one(f"y{' ' * 1_000_000}relu(x) : f32[8, 4]"),
    "a text without an end": one(f"y = relu('{'a' * 1_000_000}) : f32[8, 4]"),
    "backslashes": one(f"y = relu('{chr(92) * 1_000_001}) : f32[8, 4]"),
    "sizes": one(f"y = relu(x) : f32[{'1, ' * 300_000}]"),
    "sections": one(f"y = relu(x) : f32[8, 4]  S(0, {'9' * 1_000_000})"),
    "results": one("y = relu(x) : f32[8, 4]", "(" * 200_000),
}


@pytest.mark.parametrize("kind", LONG)
def test_a_text_of_any_kind_is_refused_in_time_that_grows_with_its_length_alone(kind: str) -> None:
    started = time.process_time()
    with pytest.raises(ParseError) as caught:
        parse(LONG[kind])
    assert time.process_time() - started < 2
    assert len(str(caught.value)) < 2000


WATCHED = """
import json, sys
from graphzero.ir.text.parser import ParseError, parse
from graphzero.sbp import registry
heard, texts = [], json.load(sys.stdin)
registry.registered(), parse(texts[-1])  # what is loaded when it is first needed
sys.addaudithook(lambda event, args: heard.append(f"{event} {args}"))
for text in texts:
    try:
        parse(text)
    except ParseError:
        pass
heard = [one for one in heard if not one.startswith(("object.__getattr__", "builtins.id"))]
assert not heard, heard
"""


def test_reading_a_text_runs_nothing() -> None:
    texts = json.dumps([*map(one, BAD_LINES), *LONG.values(), HYBRID])
    done = subprocess.run([sys.executable, "-c", WATCHED], input=texts, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_graph_may_return_nothing_and_lies_where_it_is_told() -> None:
    graph = parse("graph g(dp=2)\n  return\n", placement("cpu", [4, 7], virtual=True))
    assert graph.outputs == ()
    assert graph.placement.ranks.tolist() == [4, 7]
    assert str(parse(str(graph))) == str(graph)


def test_ops_print_short_where_that_is_clear() -> None:
    aten = torch.ops.aten
    names = {
        aten.mm.default: "mm", aten.add.Tensor: "add", aten.add.Scalar: "add.Scalar", aten.sum.default: "sum",
        aten.sum.dim_IntList: "sum.dim_IntList", torch.ops.graphzero.pin.default: "pin", math.sqrt: "math.sqrt",
        torch.ops.prims.sum.default: "prims.sum.default",
    }  # fmt: skip
    for op, name in names.items():
        assert op_name(op) == name
        text = one(f"y = {name}(x) : f32[8, 4]")
        assert parse(text).node("y").target is op


def test_long_updates_stand_one_a_line_and_read_back() -> None:
    text = step(("linear 5", "bias", "relu", "linear 5", "bias", "norm", "linear 3"))
    printed = str(parse(text))
    assert "update(\n    w0_m=" in printed
    assert list(parse(printed).updates) == list(parse(text).updates)


def test_a_diff_is_not_disturbed_by_columns() -> None:
    first, second = parse(one("y = relu(x) : f32[8, 4]")), parse(one("y = relu(x) : f32[8, 4]"))
    with second.graph.inserting_after(second.node("y")):
        relu, type_ = torch.ops.aten.relu.default, TensorType(torch.float32, (8, 4))
        second.call(relu, (second.node("y"),), type_, name="a_long_name")
    texts = [print_graph(graph, align=False).splitlines() for graph in (first, second)]
    assert [line for line in texts[1] if line not in texts[0]] == ["  a_long_name = relu(y) : f32[8, 4]"]


def test_pins_are_written_and_read() -> None:
    graph = parse(HYBRID)
    assert graph.node("wf").meta["sbp"] == (B, None)
    assert graph.node("wf").meta["pins"] == (True, False)
    graph.pin("w", "dp", S(0))
    assert "(S(0)!, S(1)!)" in str(graph)
    verify(parse(str(graph)))
