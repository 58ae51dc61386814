"""set_stage("auto"): which cuts are chosen, and that the step computes what it computes without them."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from graphs import TrainGraph
from staged import Net, batches, cross_entropy, placement, tensors_of
from torch import Tensor, nn

import graphzero as gz
from graphzero.passes import Options
from graphzero.plan.device import Device
from graphzero.plan.pipelines.stage_chooser import StageRequest
from graphzero.plugins.auto_stages.stage_choice import choose_stages
from graphzero.plugins.auto_stages.stage_cuts import choose_cuts
from graphzero.step.compile_step import prepare_for_passes

SLOW = Device(
    "slow", "cpu", {"f32": 1e6}, memory=1e12, capacity=1 << 34, call=0.0, links={"inside": gz.Link(0.0, 1e18)}
)  # arithmetic alone takes time


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def auto_graph(
    model: nn.Module, pp: int = 2, stages: int | None = None, schedule: Any = "1f1b", device: Any = None,
    loss_fn: Any = cross_entropy, micro_batches: int = 4, **options: Any,
) -> TrainGraph:  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    graph = TrainGraph(model, loss_fn, optimizer, placement=placement(pp, 2), micro_batches=micro_batches, **options)
    graph.config.set_stage("auto", stages, device=device)
    graph.config.set_pipeline(schedule)
    return graph


def decision(graph: TrainGraph, *batch: Any) -> str:
    graph.compile(*(batch or batches(1)[0]))
    (line,) = [line for line in graph.plan.decisions if line.startswith("set_stage")]
    return line


def stages_in(line: str) -> list[str]:
    """ "0: model.first" and so on."""
    return line.removeprefix('set_stage("auto"): ').split("; ")[:-1]


def by_weights(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss that reads a parameter and calls no module."""
    return (model.first.weight @ x.T).square().mean()


# ---- the choice


def _brute_force(costs: list[int], count: int, pinned: list[int | None], nbytes: list[int], limit: float) -> Any:
    """The least cost of the most costly stage, and of those the least sum of squares."""
    units = range(len(costs))
    cuts = [
        [units[first:end] for first, end in itertools.pairwise((0, *cut, len(costs)))]
        for cut in itertools.combinations(range(1, len(costs)), count - 1)
    ]
    cuts = [cut for cut in cuts if all(pinned[u] in (None, i) for i, group in enumerate(cut) for u in group)]
    fullest = [max(sum(nbytes[u] for u in group) for group in cut) for cut in cuts]
    most = max(limit, min(fullest, default=inf))
    sums = [
        [sum(costs[u] for u in group) for group in cut] for cut, size in zip(cuts, fullest, strict=True) if size <= most
    ]
    return min(((max(each), sum(x * x for x in each)) for each in sums), default=None)


@pytest.mark.parametrize("seed", range(300))
def test_cuts_are_those_of_trying_all(seed: int) -> None:
    generator = random.Random(seed)
    units = generator.randint(1, 9)
    count = generator.randint(1, units)
    costs, nbytes = ([generator.randrange(9) for _ in range(units)] for _ in range(2))
    pinned = [generator.choice([None] * 6 + [generator.randrange(count)]) for _ in range(units)]
    limit = generator.choice([inf, 10, 20])
    expected = _brute_force(costs, count, pinned, nbytes, limit)
    stages = choose_cuts(costs, count, pinned, nbytes, limit)
    if stages is None:
        assert expected is None
        return
    assert [*stages] == sorted(stages) and {*stages} == {*range(count)}
    sums = [sum(cost for cost, stage in zip(costs, stages, strict=True) if stage == i) for i in range(count)]
    assert (max(sums), sum(x * x for x in sums)) == expected


def test_parameters_are_evened_out_and_the_plan_says_how() -> None:
    of_layer, of_first, of_head = 8 * 2 + 8 * 12 + 12 + 12 * 8 + 8, 5 * 8 + 8, 8 * 5 + 5
    line = decision(auto_graph(Net()))
    sums = f"parameters read {of_first + 2 * of_layer} / {2 * of_layer + of_head}"
    assert line == f'set_stage("auto"): 0: model.first, model.layers.0-1; 1: model.layers.2-3, model.head; {sums}'
    assert decision(auto_graph(Net())) == line


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 8)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.table(x)).mean(1)  # type: ignore[no-any-return]


def test_of_a_table_the_rows_that_are_looked_up_count() -> None:
    line = decision(auto_graph(Table()), torch.randint(1000, (16, 3)), torch.randint(8, (16,)))
    rows, layer = 16 * 3 // 8, 8 * 8 + 8  # of a micro-batch on a rank
    sums = f"parameters read {rows * 8 + 2 * layer} / {2 * layer}"
    assert line == f'set_stage("auto"): 0: model.table, model.layers.0-1; 1: model.layers.2-3; {sums}'


class Pooled(nn.Module):
    """Small layers of long sequences, and larger ones of their means."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8))
        self.large = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.large(self.small(x.unsqueeze(1).expand(-1, 32, -1)).mean(1))  # type: ignore[no-any-return]


def test_with_a_device_seconds_are_evened_out() -> None:
    by_parameters = decision(auto_graph(Pooled()))
    assert stages_in(by_parameters) == ["0: model.small.0-1, model.large.0", "1: model.large.1"]
    by_seconds = decision(auto_graph(Pooled(), device=SLOW))
    assert stages_in(by_seconds) == ["0: model.small.0", "1: model.small.1, model.large.0-1"]
    rows = 16 / 2
    first = 2 * rows * 32 * 5 * 8 * 2  # forward, and the gradient of the weight
    rest = 2 * rows * (32 * 8 * 8 + 8 * 64 + 64 * 5) * 3
    assert by_seconds.endswith(f"seconds on slow {first / 1e3:.2f} ms / {rest / 1e3:.2f} ms")


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("gpipe", 2), ("zb1p", 2), ("zbv", 4), ("interleaved", 4), ([["0F0", "0B0"], ["1F0", "1B0"]], 2)],
)
def test_there_are_as_many_stages_as_the_schedule_has(schedule: Any, stages: int) -> None:
    graph = auto_graph(Net(), schedule=schedule, micro_batches=1 if isinstance(schedule, list) else 4)
    assert len(stages_in(decision(graph))) == stages


def test_the_number_of_stages_is_that_which_is_asked_for() -> None:
    assert len(stages_in(decision(auto_graph(Net(6), stages=6, schedule="interleaved")))) == 6


def test_a_limit_of_bytes_moves_the_cut() -> None:
    """Frozen layers have no gradients and states, so more of them fit."""
    model = Net()
    for layer in model.layers[:3]:
        layer.requires_grad_(False)
    graph = TrainGraph(
        model, cross_entropy, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        micro_batches=1,
    )  # fmt: skip
    with graph.prepared_call("a test", batches(1)[0], {}) as prepared:
        step, placed = prepare_for_passes(prepared.call, prepared.program.captured)
        lines = [
            choose_stages(step, Options(placed=placed), (), StageRequest(2, 2, nbytes=nbytes))[1]
            for nbytes in (1 << 20, 1)
        ]
    assert stages_in(lines[0])[0] == "0: model.first, model.layers.0-1"
    assert stages_in(lines[1])[0] == "0: model.first, model.layers.0-2"


def test_under_a_budget_values_are_computed_again_and_the_cut_stays() -> None:
    def compiled(budget: int | None) -> tuple[int, str]:
        graph = auto_graph(Net(), micro_batches=8)
        graph.config.set_memory_budget(budget)
        line = decision(graph, *batches(1, 1024)[0])
        return graph.plan.memory.peak, line

    peak, line = compiled(None)
    below, again = compiled(peak * 4 // 5)
    assert below <= peak * 4 // 5 and again == line
    with pytest.raises(gz.ConfigError, match="1,000"):
        compiled(1000)


# ---- the modules that are cut between


class Shared(nn.Module):
    """Two layers that are called in turn, twice; and a head whose weight is that of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 5, bias=False)  # before what it shares with, in the module
        self.first = nn.Linear(5, 5)
        self.first.weight = self.head.weight
        self.turns = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.last = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in [*self.turns, *self.turns]:
            x = torch.relu(layer(x))
        return self.head(self.last(x))  # type: ignore[no-any-return]


def test_layers_that_are_called_in_turn_are_on_one_stage_and_a_shared_weight_where_it_is_read_first() -> None:
    model = Shared().double()
    torch.set_default_dtype(torch.float64)
    try:
        staged = auto_graph(copy.deepcopy(model), 2)
        whole = TrainGraph(model, cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-2), micro_batches=4)
        doubles = [(x.double(), y) for x, y in batches()]
        results = [tensors_of([graph(*batch) for batch in doubles]) for graph in (staged, whole)]
        line = decision(staged, *doubles[0])
    finally:
        torch.set_default_dtype(torch.float32)
    assert stages_in(line) == ["0: model.first, model.turns.0-1", "1: model.last, model.head"]
    assert all(torch.allclose(*pair, rtol=0, atol=1e-14) for pair in zip(*results, strict=True))


class Nested(nn.Module):
    """Lists within a list; and a configuration that names modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for tower in self.towers:
            x = tower(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def test_lists_within_lists_are_cut_where_the_outer_one_is_too_short() -> None:
    assert stages_in(decision(auto_graph(Nested())))[0] == "0: model.first, model.towers.0"
    six = decision(auto_graph(Nested(), 2, 6, "interleaved"))
    assert "model.towers.0.0" in six and "model.towers.1.1" in six


def test_a_configurations_own_plan_says_what_is_cut_between() -> None:
    class Configured(Nested):
        class config:  # noqa: N801 - as transformers calls it
            base_model_pp_plan = {"first": (["x"], ["x"]), "towers": (["x"], ["x"]), "head": (["x"], ["x"])}  # noqa: RUF012

    line = decision(auto_graph(Configured(), 2, 4, "interleaved"))
    assert "norm" not in line and stages_in(line)[1:3] == ["1: model.towers.0", "2: model.towers.1"]
    with pytest.raises(gz.ConfigError, match="6 stages, and build calls 4 modules"):
        decision(auto_graph(Configured(), 2, 6, "interleaved"))


# ---- beside marks, and errors


def test_marked_modules_are_where_they_are_marked() -> None:
    graph = auto_graph(Net())
    graph.config.set_stage("model.layers.[0-2]", 0)
    assert stages_in(decision(graph)) == ["0: model.first, model.layers.0-2", "1: model.layers.3, model.head"]
    assert len(tensors_of(graph(*batches(1)[0]))) == 2


def test_marks_that_leave_no_cut_are_refused() -> None:
    graph = auto_graph(Net())
    graph.config.set_stage("model.layers.0", 1)
    graph.config.set_stage("model.layers.2", 0)
    with pytest.raises(gz.ConfigError, match=r"no cut of 6 modules into 2 stages.*\n  build calls them in this order"):
        decision(graph)


def test_a_mark_within_a_block_is_refused() -> None:
    graph = auto_graph(Net())
    graph.config.set_stage("model.layers.1.up", 1)
    with pytest.raises(
        gz.ConfigError,
        match=r"model.layers.1.\w+ is .*, and model.layers.1, all of which is on one stage, is not marked",
    ):
        decision(graph)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(gz.ConfigError, match=r"8 stages, and build calls 6 modules .*model.first, model.layers.0"):
        decision(auto_graph(Net(), 4, 8, "interleaved"))


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (lambda: TrainGraph(Net(), cross_entropy).config.set_stage("auto"), "has no axis 'pp'"),
        (lambda: auto_graph(Net(), stages=0), "give the number of stages, 1 or more"),
        (lambda: auto_graph(Net(), stages=True), "give the number of stages, 1 or more"),
        (lambda: auto_graph(Net(), device="abacus"), "there is no device 'abacus'"),
        (lambda: auto_graph(Net(), device=3), "give the name of a device"),
        (
            lambda: auto_graph(Net()).config.set_stage("model.first", 0, device="h100"),
            'a device is of set_stage."auto"',
        ),
        (lambda: decision(auto_graph(Net(), 2, 3)), "3 stages are not a multiple of 2"),
        (lambda: decision(auto_graph(Net(), loss_fn=by_weights)), "build calls 0 modules .*: none has parameters"),
    ],
)
def test_what_cannot_be_is_refused(refused: Callable[[], Any], text: str) -> None:
    with pytest.raises(gz.ConfigError, match=text):
        refused()


# ---- models of transformers


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def gpt2(tied: bool = False, layers: int = 3) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=layers, n_head=2, n_positions=32, tie_word_embeddings=tied, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def t5(tied: bool = False, layers: int = 2) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=layers, num_decoder_layers=layers, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    if not tied:
        model.lm_head.weight = nn.Parameter(model.shared.weight.detach().clone())
    return model  # type: ignore[no-any-return]


def tokens() -> Tensor:
    return torch.randint(32, (2, 8, 6), generator=torch.Generator().manual_seed(1))


def language_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(input_ids=x, labels=x).loss  # type: ignore[no-any-return]


def trained(
    model: nn.Module, pp: int, stage: int = 2, micro_batches: int = 4, **options: Any
) -> tuple[list[Tensor], TrainGraph]:
    model, options = copy.deepcopy(model), {"clip": 1.0, "stage": stage, "micro_batches": micro_batches, **options}
    if pp:
        graph = auto_graph(model, pp, loss_fn=language_loss, **options)
    else:
        graph = TrainGraph(model, language_loss, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
    torch.manual_seed(3)
    return tensors_of(([graph(x) for x in tokens()], graph.full_state_dict())), graph


CUTS = {
    gpt2: [
        "0: model.transformer.wte, model.transformer.wpe, model.transformer.h.0-1",
        "1: model.transformer.h.2, model.transformer.ln_f, model.lm_head",
    ],
    llama: [
        "0: model.model.embed_tokens, model.model.layers.0",
        "1: model.model.layers.1",
        "2: model.model.layers.2",
        "3: model.model.norm, model.lm_head",
    ],
    t5: [
        "0: model.encoder.embed_tokens, model.decoder.embed_tokens, model.encoder.block.0",
        "1: model.encoder.block.1, model.encoder.final_layer_norm",
        "2: model.decoder.block.0",
        "3: model.decoder.block.1, model.decoder.final_layer_norm, model.lm_head",
    ],
}  # fmt: skip


@pytest.mark.parametrize("make", [pytest.param(make, marks=[pytest.mark.slow] * (make is t5)) for make in CUTS])
def test_models_of_transformers_compute_what_they_compute_without_stages(make: Callable[[], nn.Module]) -> None:
    """To the bit; T5 has skips, from the encoder and the first block's bias of positions to all blocks, and Llama has
    tables of positions that all blocks read: both go past stages."""
    model = make()
    expected, _ = trained(model, 0)
    results, graph = trained(model, len(CUTS[make]))
    assert all(map(torch.equal, results, expected))
    assert stages_in(decision(graph, tokens()[0])) == CUTS[make]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_tied_weight_is_cast_on_the_stage_that_has_it(stage: int) -> None:
    """To the bit with one micro-batch; with more, 16-bit sums of a tied weight's gradients round in another order."""
    model, results = gpt2(tied=True, layers=1), []
    for pp in (0, 2):
        results.append(trained(model, pp, stage, micro_batches=1, dtype=torch.bfloat16)[0])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("make", [gpt2, pytest.param(t5, marks=pytest.mark.slow)])
def test_tied_weights_differ_by_the_rounding_of_their_sum(make: Callable[..., nn.Module]) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = make(tied=True, layers=1)
        expected, _ = trained(model, 0)
        results, graph = trained(model, 2)
        line = decision(graph, tokens()[0])
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.allclose(*pair, rtol=0, atol=1e-12) for pair in zip(results, expected, strict=True))
    assert "model.lm_head" in stages_in(line)[1]
