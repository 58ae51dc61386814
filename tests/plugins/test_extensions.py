"""Plug-ins that cannot be used raise an error that names their distribution."""

from __future__ import annotations

import configparser
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from distributions import forget, install
from graphs import TrainGraph, mean_square
from toys import step

import graphzero as gz
from graphzero import extensions
from graphzero.cli import command, main
from graphzero.config import PluginValue, Settings, plugin_settings
from graphzero.ir.text.parser import parse
from graphzero.passes import Pipeline, pass_list, pass_names
from graphzero.plan.plan_extension import plan_extensions
from graphzero.plan.variants import run_unverified
from graphzero.runtime.execute.checks import room_checks
from graphzero.step.input_transform import active_transform

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = """
import dataclasses
import torch
from graphzero.config import Check, PluginSetting
from graphzero.passes import PassEntry
from graphzero.passes.place.expand import DefinitionWriter
from graphzero.plugins.experts.room_check import check_room
from graphzero.runtime.execute.checks import RoomCheck

@dataclasses.dataclass(frozen=True)
class Noop:
    \"\"\"Leaves a graph as it is.\"\"\"
    limit: int = 0
    def __call__(self, graph):
        return graph

@dataclasses.dataclass(frozen=True)
class Further(Noop):
    pass

@dataclasses.dataclass(frozen=True)
class Reserve:
    \"\"\"Has room for inputs up to 0.\"\"\"
    def __call__(self, graph):
        first = next(node for node in graph.nodes if node.op == "call_function")
        largest = DefinitionWriter(graph, first)(torch.ops.aten.amax.default, next(graph.placeholders("batch")))
        check_room(graph, [largest], "maximum", reserved.message)
        return graph

def set_depth(config, depth):
    return [0, 1, 2][depth]

@dataclasses.dataclass(frozen=True)
class Uncalled:
    pass

@dataclasses.dataclass(frozen=True)
class Wide(Noop):
    width: int = dataclasses.field(kw_only=True)

@dataclasses.dataclass(frozen=True)
class Weighted(Noop):
    \"\"\"Has an option without a text form.\"\"\"
    weights: torch.Tensor = None

weighted = PassEntry(Weighted, "captured", after="zero")
of_an_object = PassEntry(Noop(), "captured", after="zero")
not_called = PassEntry(Uncalled, "captured", after="zero")
no_default = PassEntry(Wide, "captured", after="zero")
reserving = PassEntry(Reserve, "captured", after="zero")
behind_zero = PassEntry(Noop, "captured", after="zero")
behind_noop = PassEntry(Further, "captured", after="noop")
behind_nothing = PassEntry(Noop, "captured", after="nothing")
too_early = PassEntry(Noop, "local", after="zero")
behind_propagate = PassEntry(Noop, "propagated", after="propagate")
behind_localize = PassEntry(Further, "local", after="localize")
in_fuse = PassEntry(Noop, "local", group="fuse", after="localize")
in_fuse_early = PassEntry(Further, "local", group="fuse", after="fuse_cross_entropy")
first_in_schedule = PassEntry(Noop, "local", group="schedule", after="bucket")
second_in_schedule = PassEntry(Further, "local", group="schedule", after="noop")
in_schedule_far = PassEntry(Noop, "local", group="schedule", after="localize")
in_schedule_late = PassEntry(Noop, "local", group="schedule", after="dead_code")
in_no_group = PassEntry(Noop, "local", group="fused", after="localize")
setting = PluginSetting(0, Check(lambda x: isinstance(x, int), "give an int"))
by_method = dataclasses.replace(setting, method=set_depth)
reserved = RoomCheck("a maximum of 0", "the maximum is above 0", lambda graph: None)
wordless = RoomCheck("", "the maximum is above 0", lambda graph: None)
unchanging = RoomCheck("a maximum of 0", "the maximum is above 0", None)
taken = RoomCheck("room for the rows of experts", "", lambda graph: None)
no_check = PluginSetting(0, lambda x: True)
no_words = PluginSetting(0, Check(lambda x: True, None))
check_stops = PluginSetting(None, Check(lambda x: x > 0, "give an int"))
no_hash = PluginSetting([], Check(lambda x: True, "give anything"))
nameless_method = dataclasses.replace(setting, method=lambda config, depth: depth)
method_of_nothing = dataclasses.replace(setting, method=lambda: 0)
method_in_words = dataclasses.replace(setting, method="set_depth")
wrong_words = dataclasses.replace(setting, said="set {depth}")
any_value = PluginSetting(None, Check(lambda x: True, "give anything"))
above_zero = PluginSetting(1, Check(lambda x: x > 0, "give a number above 0"))
said_without_a_method = dataclasses.replace(setting, said="depth = {}")
wrong_setting = PluginSetting("", Check(lambda x: isinstance(x, int), "give an int"))

def read_recipe(config, given):
    config.enable_zero(stage=given["zero"])

def halves(graph, options, own, request):
    return ("model.0@0", "model.1@1"), f"{request.count} halves on {request.members} ranks"
"""
Site = Callable[..., None]


@pytest.fixture
def site(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Installs a distribution whose module is ``TEXT`` under a name of its own."""
    added: list[str] = []

    def add(
        point: str, entry: str, target: str, name: str = "others-plugin", where: str = "", text: str = TEXT
    ) -> None:
        folder = tmp_path / (where or name)
        folder.mkdir()
        module = name.replace("-", "_")
        install(folder, name, {module: text}, {f"graphzero.{point}": {entry: target.replace("MODULE", module)}})
        monkeypatch.syspath_prepend(str(folder))
        added.append(module)
        forget()

    yield add
    monkeypatch.undo()
    for module in added:
        sys.modules.pop(module, None)
    forget()


def test_the_plug_ins_of_graphzero_are_those_that_it_declares_and_each_loads() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["options"]["entry_points"] == "file: graphzero/entry_points.txt"
    assert setup["metadata"]["name"] == extensions.DISTRIBUTION
    declared = {point: sorted(extensions.extensions(point)) for point in extensions.POINTS}
    assert declared == {
        "graphzero.commands": ["calibrate", "doctor", "opt", "plan", "show", "trace", "tune"],
        "graphzero.passes": [
            "fuse_accumulate",
            "fuse_adam",
            "fuse_cross_entropy",
            "fuse_pieces",
            "join_updates",
            "pad_targets",
            "ring_attention",
            "split_attention",
            "split_experts",
            "split_routing",
            "stack_updates",
            "tile_rows",
        ],
        "graphzero.settings": ["expert_capacity", "row_tiles", "shapes", "split_attention", "split_experts"],
        "graphzero.inputs": ["shapes"],
        "graphzero.configs": ["deepspeed"],
        "graphzero.stages": ["auto"],
        "graphzero.splits": ["auto"],
        "graphzero.plans": ["row_tiles", "split_attention", "split_experts"],
        "graphzero.checks": ["room_for_rows"],
        "graphzero.executors": ["inductor"],
    }
    for point, names in declared.items():
        for name in names:
            plugin = extensions.extensions(point)[name]
            assert plugin.load() is plugin.load() and plugin.target.startswith("graphzero.plugins.")


def test_a_copy_of_graphzeros_own_metadata_adds_nothing(site: Site) -> None:
    before = extensions.extensions(extensions.COMMANDS)
    site("commands", "tune", "graphzero.plugins.tune.command", name="graphzero-torch")
    assert extensions.extensions(extensions.COMMANDS) == before


def test_metadata_that_is_there_twice_counts_once(site: Site) -> None:
    site("passes", "noop", "MODULE:behind_zero", where="here")
    site("passes", "noop", "MODULE:behind_zero", where="there")
    assert pass_names().count("noop") == 1


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("nowhere_at_all:PASS", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("MODULE:absent", "cannot be loaded: AttributeError"),
        ("MODULE:behind_nothing", "follows 'nothing', and no pass has that name; they are pin, zero"),
        ("MODULE:too_early", "runs on 'local' graphs, and after zero they are 'captured'"),
        ("MODULE:setting", "is not a pass: give a graphzero.passes.PassEntry of a dataclass"),
        ("MODULE:behind_noop", "has a pass called 'further'"),
        ("MODULE:of_an_object", "is not a pass: give a graphzero.passes.PassEntry of a dataclass"),
        ("MODULE:not_called", "is not a pass: objects of its dataclass cannot be called with a graph"),
        ("MODULE:no_default", "has a pass whose field 'width' has no default, which it needs where none is set"),
        ("MODULE:in_no_group", "has a pass in the group 'fused'; groups are fuse, schedule"),
        (
            "MODULE:in_schedule_far",
            "follows 'localize', which is neither of the group nor right before it: give after= ",
        ),
        (
            "MODULE:in_schedule_late",
            "follows 'dead_code', which is neither of the group nor right before it: give after=",
        ),
    ],
)
def test_a_pass_that_cannot_be_used_is_refused_with_its_distribution(site: Site, target: str, problem: str) -> None:
    site("passes", "noop", target)
    with pytest.raises(gz.ConfigError) as caught:
        pass_names()
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("plug-in 'noop' (graphzero.passes: ") and problem in lines[0]
    assert "of the distribution others-plugin " in lines[0]
    assert lines[1] == "  Update it, or uninstall it: pip uninstall others-plugin"


def test_passes_of_plug_ins_follow_each_other_whatever_their_order(site: Site) -> None:
    site("passes", "further", "MODULE:behind_noop", name="a-plugin")
    site("passes", "noop", "MODULE:behind_zero", name="b-plugin")
    names = pass_names()
    at = names.index("zero")
    assert names[at + 1 : at + 3] == ("noop", "further")
    assert gz.passes.Noop.__name__ == "Noop"
    assert [gz.passes.pass_name(one) for one in gz.passes.parse_passes("pin,noop{limit=2}")] == ["pin", "noop"]


def test_a_pass_may_stand_at_the_beginning_of_a_level(site: Site) -> None:
    site("passes", "noop", "MODULE:behind_propagate")
    names = pass_names()
    assert names[names.index("propagate") + 1] == "noop"


def test_a_pass_of_a_group_is_its_last_and_others_stay_outside(site: Site) -> None:
    site("passes", "noop", "MODULE:in_fuse", name="a-plugin")
    site("passes", "further", "MODULE:behind_localize", name="b-plugin")
    names = pass_names()
    assert names[names.index("localize") + 1] == "further"
    assert names[names.index("fuse_adam") + 1] == "noop"
    assert gz.passes.pass_name(gz.passes.Fuse().passes[-1]) == "noop"
    own = gz.passes.default_passes(own=[(lambda graph: graph, "fuse")])
    assert own.index(next(one for one in own if gz.passes.pass_name(one) == "noop")) + 1 == next(
        i for i, one in enumerate(own) if not dataclasses.is_dataclass(one)
    )


def test_a_pass_of_a_group_follows_the_one_that_it_names_there(site: Site) -> None:
    site("passes", "further", "MODULE:in_fuse_early")
    names = pass_names()
    assert names[names.index("fuse_cross_entropy") + 1] == "further"


def test_a_pass_of_a_group_that_follows_what_is_before_it_is_its_first(site: Site) -> None:
    site("passes", "further", "MODULE:second_in_schedule", name="a-plugin")
    site("passes", "noop", "MODULE:first_in_schedule", name="b-plugin")
    names = pass_names()
    assert names[names.index("bucket") + 1 :][:3] == ("noop", "further", "launch")
    assert [gz.passes.pass_name(one) for one in gz.passes.Schedule().passes][:3] == ["noop", "further", "launch"]


def test_two_distributions_that_declare_one_name_are_refused(site: Site) -> None:
    site("passes", "noop", "MODULE:behind_zero", name="a-plugin")
    site("passes", "noop", "MODULE:behind_zero", name="b-plugin")
    with pytest.raises(gz.ConfigError, match="b-plugin has the name of another one, a_plugin:behind_zero of a-plugin"):
        pass_names()


def test_a_pass_with_the_name_of_a_built_in_one_is_refused(site: Site) -> None:
    text = TEXT.replace("Noop", "Pin")
    site("passes", "pin", "MODULE:behind_zero", text=text)
    with pytest.raises(gz.ConfigError, match="has a pass called 'pin'"):
        pass_names()


@pytest.mark.parametrize(
    ("entry", "target", "problem"),
    [
        ("executor", "MODULE:setting", "adds config.executor, which is there already"),
        ("inputs", "MODULE:setting", "adds config.inputs, which is there already"),
        ("depth", "MODULE:wrong_setting", "has a default that its own check refuses, ''"),
        ("depth", "MODULE:Noop", "is not a setting: give a graphzero.config.PluginSetting"),
        ("depth", "MODULE:no_check", "has the check <function .*; give a graphzero.config.Check"),
        ("depth", "MODULE:no_words", "has the check .*; give a graphzero.config.Check of a function and of words"),
        ("depth", "MODULE:check_stops", "stopped: TypeError: .*, at .*others_plugin.py:.* in <lambda>"),
        ("depth", "MODULE:no_hash", r"has a default without a hash, \[\]"),
        (
            "depth",
            "MODULE:nameless_method",
            "has the method <function .*; give a function, by the name that users call",
        ),
        (
            "depth",
            "MODULE:method_of_nothing",
            "has the method <function .*; give a function, by the name that users call",
        ),
        ("depth", "MODULE:method_in_words", "has the method 'set_depth'; give a function, by the name that users call"),
        ("depth", "MODULE:wrong_words", "stopped: KeyError: 'depth'"),
        ("my-depth", "MODULE:setting", "adds config.my-depth, which nobody can write"),
        ("class", "MODULE:setting", "adds config.class, which nobody can write"),
        ("shapes", "MODULE:setting", "has the name of another one, graphzero.plugins.ragged.shapes:SHAPES"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(site: Site, entry: str, target: str, problem: str) -> None:
    site("settings", entry, target)
    config = gz.GraphConfig(gz.placement("cpu", range(2), virtual=True))
    with pytest.raises(gz.ConfigError, match=problem):
        config.depth = 1


def test_a_setting_is_compared_among_ranks_and_may_make_another_program(site: Site) -> None:
    site("settings", "depth", "MODULE:setting")
    config = gz.GraphConfig(gz.placement("cpu", range(2), virtual=True))
    assert (config.depth, config.description) == (0, "")
    config.depth = 3
    assert (config.depth, config.description) == (3, "depth=3") and config.fingerprint != Settings().fingerprint
    config.depth = 0
    assert config.settings == Settings()
    with pytest.raises(gz.ConfigError, match="^config.depth = 'x': give an int$"):
        config.depth = "x"


@pytest.mark.parametrize(
    ("target", "value", "problem"),
    [
        ("any_value", [1], r"^config.depth = \[1\]: programs are found by it, and a list has no hash$"),
        ("any_value", object(), "^config.depth = <object object at .*>: ranks compare its text, .*; define __str__$"),
        ("above_zero", "a", "of the distribution others-plugin stopped: TypeError: .* in <lambda>"),
        ("said_without_a_method", "a", "^depth = 'a': give an int$"),
    ],
)
def test_a_value_that_programs_and_ranks_cannot_compare_is_refused(
    site: Site, target: str, value: object, problem: str
) -> None:
    site("settings", "depth", f"MODULE:{target}")
    config = gz.GraphConfig(gz.placement("cpu", range(2), virtual=True))
    with pytest.raises(gz.ConfigError, match=problem):
        config.depth = value


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("MODULE:setting", "is not a command: it has no SUMMARY, add_arguments, run"),
        ("MODULE.nothing", "cannot be loaded: ModuleNotFoundError"),
        ("MODULE:Lint", "is not a command but a class of some: give an object of it"),
        ("MODULE:unnamed", "is not a command: SUMMARY is a text"),
        ("MODULE:asks_twice", "stopped: ArgumentError: argument --deep: conflicting option string: --deep, at "),
        ("MODULE:stops", "stopped: KeyError: 'deep', at "),
        ("MODULE:says_done", "ended with the status 'done'; run returns a number, or None for 0"),
    ],
)
def test_a_command_that_cannot_be_used_is_refused_and_others_run(
    site: Site, capsys: pytest.CaptureFixture[str], target: str, problem: str
) -> None:
    site("commands", "lint", target, text=TEXT + COMMANDS)
    assert main(["lint"]) == 2
    assert problem in capsys.readouterr().err
    assert main(["opt", "--list"]) == 0


def test_a_pass_with_an_option_that_has_no_text_form_is_listed(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site("passes", "weighted", "MODULE:weighted")
    assert main(["opt", "--list"]) == 0
    assert "Has an option without a text form." in capsys.readouterr().out


def test_a_reader_that_cannot_be_called_is_refused(site: Site) -> None:
    site("configs", "recipe", "MODULE:setting")
    with pytest.raises(gz.ConfigError, match="is not a reader of configurations: it cannot be called"):
        gz.GraphConfig.from_recipe({})
    with pytest.raises(AttributeError, match="no attribute 'from_nothing'"):
        _ = gz.GraphConfig.from_nothing


def test_an_extension_of_plans_that_cannot_be_used_is_refused(site: Site) -> None:
    site("plans", "buckets", "MODULE:setting")
    with pytest.raises(gz.ConfigError, match="is not an extension of plans: give an object of"):
        plan_extensions()


def test_an_executor_that_cannot_be_used_is_refused_and_its_name_is_a_choice(site: Site) -> None:
    site("executors", "tracer", "MODULE:Noop")
    with pytest.raises(gz.ConfigError, match=r"set_executor\('jit'\): choose one of 'eager', 'inductor', 'tracer'"):
        gz.GraphConfig(gz.placement("cpu", [0], virtual=True)).set_executor("jit")
    graph = TrainGraph(torch.nn.Linear(2, 2), mean_square, placement=gz.placement("cpu", [0], virtual=True))
    graph.config.set_executor("tracer")
    with pytest.raises(gz.ConfigError, match="plug-in 'tracer' .* is not an executor: it has no join, region_function"):
        graph(torch.ones(2, 2))


def test_stages_are_chosen_by_the_plug_in_that_is_named(site: Site) -> None:
    ranks = gz.placement("cpu", range(2), names=("pp",), virtual=True)

    def staged(*stage: object) -> tuple[TrainGraph, torch.Tensor]:
        torch.manual_seed(0)
        graph = TrainGraph(
            torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), mean_square, placement=ranks
        )
        graph.config.set_stage(*stage)
        return graph, graph(torch.ones(2, 2))

    site("stages", "halves", "MODULE:halves")
    graph, loss = staged("halves")
    assert "2 halves on 2 ranks" in graph.plan.decisions and graph.config.description == "auto_stages=halves"
    auto, wanted = staged("auto")
    assert torch.equal(loss, wanted) and graph.config.fingerprint != auto.config.fingerprint


def test_a_chooser_of_stages_that_cannot_be_called_is_refused(site: Site) -> None:
    site("stages", "wrong", "MODULE:setting")
    ranks = gz.placement("cpu", range(2), names=("pp",), virtual=True)
    graph = TrainGraph(torch.nn.Linear(2, 2), mean_square, placement=ranks)
    graph.config.set_stage("wrong")
    with pytest.raises(gz.ConfigError, match="plug-in 'wrong' .* is not a chooser of stages: it cannot be called"):
        graph.compile(torch.ones(2, 2))


def test_splits_are_given_by_the_plug_in_that_is_named(site: Site) -> None:
    site("splits", "rows", "MODULE:split_rows", text=SPLITS)
    site("splits", "text", "MODULE:say_rows", name="b-plugin", text=SPLITS)
    site("splits", "numbers", "MODULE:number_rows", name="c-plugin", text=SPLITS)
    with pytest.raises(gz.ConfigError, match="plug-in 'numbers' .* give the SBPs of parameters by name"):
        gz.to_global(torch.nn.Linear(2, 4), gz.placement("cpu", range(2), names=("tp",), virtual=True), sbp="numbers")
    ranks = gz.placement("cpu", range(2), names=("tp",), virtual=True)
    model = gz.to_global(torch.nn.Linear(2, 4), ranks, sbp="rows")
    assert gz.sbp.of(model.weight) == (gz.sbp.S(0),) and gz.sbp.of(model.bias) == (gz.sbp.B,)
    with pytest.raises(gz.ConfigError, match=r"plug-in 'text' .* gave 'S\(0\)'; give the SBPs of parameters by name"):
        gz.to_global(torch.nn.Linear(2, 4), ranks, sbp="text")
    with pytest.raises(gz.SbpError, match=r"needs sbp= with one SBP per axis \(tp\), not 'columns'"):
        gz.to_global(torch.nn.Linear(2, 4), ranks, sbp="columns")


def test_of_two_transforms_of_inputs_one_can_be_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site("inputs", "depth", "MODULE:Noop")
    both = PluginValue("depth", 1), PluginValue("shapes", None)
    monkeypatch.setattr(plugin_settings, "plugin_settings", lambda: dict.fromkeys(("depth", "shapes")))
    with pytest.raises(gz.ConfigError, match="config.depth and config.shapes each transform the inputs"):
        active_transform(Settings(plugins=both))
    assert active_transform(Settings()) is None


def test_a_field_of_a_pass_is_given_the_value_of_a_plug_ins_setting(site: Site) -> None:
    site("passes", "noop", "MODULE:behind_zero")
    passes = pass_list.default_passes(gz.passes.Options(plugins={"limit": 7}))
    assert [one.limit for one in passes if type(one).__name__ == "Noop"] == [7]


def test_wrong_arguments_of_a_method_say_it_as_those_of_a_method_of_graphzero(site: Site) -> None:
    site("settings", "depth", "MODULE:by_method", name="a-plugin")
    site("configs", "recipe", "MODULE:read_recipe", name="b-plugin")
    config = gz.GraphConfig(gz.placement("cpu", [0], virtual=True))
    for args, problem in (((), "missing a required argument: 'depth'"), ((1, 2), "too many positional arguments")):
        with pytest.raises(TypeError, match=rf"^GraphConfig.set_depth\(\) {problem}: it takes \(depth\)$"):
            config.set_depth(*args)
    with pytest.raises(
        TypeError, match=r"^GraphConfig.from_recipe\(\) missing 1 required positional argument: 'given'$"
    ):
        gz.GraphConfig.from_recipe()
    config.set_depth(1)
    with pytest.raises(gz.ConfigError, match=r"of the distribution a-plugin stopped: IndexError: .* in set_depth\n"):
        config.set_depth(3)
    with pytest.raises(
        gz.ConfigError, match=r"of the distribution b-plugin stopped: KeyError: 'zero', .* in read_recipe\n"
    ):
        gz.GraphConfig.from_recipe({}, gz.placement("cpu", [0], virtual=True))


def test_two_plug_ins_with_a_method_of_one_name_are_refused(site: Site) -> None:
    site("settings", "depth", "MODULE:by_method", name="a-plugin")
    site("settings", "width", "MODULE:by_method", name="b-plugin")
    config = gz.GraphConfig(gz.placement("cpu", [0], virtual=True))
    with pytest.raises(gz.ConfigError, match="of the distribution b-plugin adds config.set_depth, which is there al"):
        config.set_depth(1)


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("MODULE:setting", "is not a check: give a graphzero.runtime.execute.checks.RoomCheck"),
        ("MODULE:taken", "has the message of another check, 'room for the rows of experts'"),
        ("MODULE:wordless", "has a check without a message, a problem in words, or a function that gives more"),
        ("MODULE:unchanging", "has a check without a message, a problem in words, or a function that gives more"),
    ],
)
def test_a_check_of_room_that_cannot_be_used_is_refused(site: Site, target: str, problem: str) -> None:
    site("checks", "room", target)
    with pytest.raises(gz.ConfigError, match=problem):
        room_checks()


def test_a_step_whose_plug_in_gives_no_more_room_stops(site: Site) -> None:
    site("passes", "reserve", "MODULE:reserving", name="a-plugin")
    site("checks", "maximum", "MODULE:reserved", name="b-plugin")
    graph = TrainGraph(torch.nn.Linear(2, 2), mean_square, placement=gz.placement("cpu", range(2), virtual=True))
    graph(-torch.ones(2, 2))
    for call in (graph, lambda x: gz.check(graph, x)):
        with pytest.raises(gz.errors.CapacityError, match="the maximum is above 0; calls of a Graph do so"):
            call(torch.ones(2, 2))


def test_a_command_may_have_any_option_and_any_summary(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site("commands", "lint", "MODULE:runs", text=TEXT + COMMANDS)
    assert main(["lint", "--run", "3"]) == 3
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "90 % of steps" in capsys.readouterr().out


def test_a_command_of_others_whose_output_is_no_longer_read_ends_as_others_do(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site("commands", "lint", "MODULE:unread", text=TEXT + COMMANDS)
    monkeypatch.setattr(command, "_drop_output", lambda: None)
    assert main(["lint"]) == command.UNREAD


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("setting", "is not a transform of inputs: it has no read_inputs, rewrite_capture, uncut_inputs, capture_key"),
        ("stopping", "stopped: KeyError: 'x', at .* in read_inputs"),
    ],
)
def test_a_transform_of_inputs_that_misbehaves_is_named(site: Site, target: str, problem: str) -> None:
    site("settings", "depth", "MODULE:setting", name="a-plugin")
    site("inputs", "depth", f"MODULE:{target}", text=TEXT + TRANSFORM)
    graph = two_layers()
    graph.config.depth = 1
    with pytest.raises(gz.ConfigError, match=REFUSED.format("inputs", problem)):
        graph(torch.ones(2, 2))


COMMANDS = """
import errno

class Lint:
    SUMMARY = "90 % of steps"
    def add_arguments(self, parser):
        parser.add_argument("--run", type=int)
    def run(self, options):
        return options.run

class Unnamed(Lint):
    SUMMARY = None

class AsksTwice(Lint):
    def add_arguments(self, parser):
        parser.add_argument("--deep")
        parser.add_argument("--deep")

class StopsAtOnce(Lint):
    def run(self, options):
        raise KeyError("deep")

class SaysDone(Lint):
    def run(self, options):
        return "done"

class Unread(Lint):
    def run(self, options):
        raise BrokenPipeError(errno.EPIPE, "closed")

runs, unnamed, asks_twice, stops, says_done, unread = (
    Lint(), Unnamed(), AsksTwice(), StopsAtOnce(), SaysDone(), Unread()
)
"""

TRANSFORM = """
class Stopping:
    def read_inputs(self, reader, ranks, settings, args, kwargs, running):
        return kwargs["x"]
    def rewrite_capture(self, step, inputs, transformed, captured):
        return captured
    def uncut_inputs(self, settings):
        return ()
    def capture_key(self, settings):
        return "stopping", 0

stopping = Stopping()
"""

SPLITS = """
import graphzero as gz

def number_rows(module, placement):
    return {0: (gz.sbp.S(0),)}

def split_rows(module, placement):
    return {name: (gz.sbp.S(0),) for name, _ in module.named_parameters() if "weight" in name}

def say_rows(module, placement):
    return "S(0)"
"""

BAD = (
    TEXT
    + """
from graphzero.ir import ops
from graphzero.passes import BuiltinPass
from graphzero.plan import PlanExtension

class Raises(PlanExtension):
    def find_fitting(self, variants, options, budget, program, best):
        raise KeyError("size")

class SaysNothing(PlanExtension):
    def find_fitting(self, variants, options, budget, program, best):
        return None

class SaysText(PlanExtension):
    def find_fitting(self, variants, options, budget, program, best):
        return options, program, "text"

class Differs(PlanExtension):
    def find_fitting(self, variants, options, budget, program, best):
        return options, best(dataclasses.replace(options, bucket_bytes=1)), ()

class DescribesAnother(PlanExtension):
    def describe_program(self, variants, options, program):
        return dataclasses.replace(program, graph=program.graph.clone())

def change(graph):
    node = next(node for node in graph.nodes if node.target is torch.ops.aten.addmm.default)
    node.args = (*node.args[:2], node.args[2])

class ChangesCaptured(PlanExtension):
    def find_fitting(self, variants, options, budget, program, best):
        change(variants.captured)
        return options, program, ()

class ChangesGiven(PlanExtension):
    def find_fitting(self, variants, options, budget, program, best):
        change(program.graph)
        return options, program, ()

class ChangesMade(PlanExtension):
    def find_fitting(self, variants, options, budget, program, best):
        options = dataclasses.replace(options, bucket_bytes=1)
        program = best(options)
        change(program.graph)
        return options, program, ()

class ChangesDescribed(PlanExtension):
    def describe_program(self, variants, options, program):
        change(program.graph)
        return program

changes_captured, changes_given, changes_made = ChangesCaptured(), ChangesGiven(), ChangesMade()
changes_described = ChangesDescribed()
raises, says_nothing, says_text, differs, other = Raises(), SaysNothing(), SaysText(), Differs(), DescribesAnother()

def no_marks(graph, options, own, request):
    return (), "none"

def one_text(graph, options, own, request):
    return "model.0@0", "one"

def fails(graph, options, own, request):
    raise IndexError("no unit")

def changes_the_graph(graph, options, own, request):
    for node in graph.nodes:
        if node.target is torch.ops.aten.addmm.default:
            node.args = (node.args[0], *node.args[:0:-1])
    return ("model.0@0", "model.1@1"), "halves"

def deepen(config, depth):
    return [depth] if depth < 0 else dict.fromkeys(("depth", "height")[:depth], 1) | {"width": 1}

by_both = dataclasses.replace(setting, method=deepen)

def is_there(options):
    return options.adds_up

asks_itself = PassEntry(Noop, "captured", is_there, after="zero", adds_up=True)

@dataclasses.dataclass(frozen=True)
class Misnamed(Noop):
    limit: int = dataclasses.field(default=0, metadata={"setting": "limits"})

of_no_setting = PassEntry(Misnamed, "captured", after="zero")

@dataclasses.dataclass(frozen=True)
class Stops(Noop):
    def __call__(self, graph):
        return graph.meta["stage"]

@dataclasses.dataclass(frozen=True)
class Forgets(Noop):
    def __call__(self, graph):
        pass

@dataclasses.dataclass(frozen=True)
class Misphased(BuiltinPass):
    def __call__(self, graph):
        first = next(node for node in graph.nodes if node.op == "call_function")
        first.meta["phase"] = "forwards"
        return graph

@dataclasses.dataclass(frozen=True)
class Reduces(BuiltinPass):
    def __call__(self, graph):
        first = next(node for node in graph.nodes if node.op == "call_function")
        with graph.graph.inserting_after(first):
            again = graph.call(ops.all_reduce, (first, "dp", "sum"), first.meta["type"], like=first)
        first.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
        return graph

@dataclasses.dataclass(frozen=True)
class Renamed(Noop):
    name = "other"
    def __call__(self, graph):
        raise KeyError("x")

renamed = PassEntry(Renamed, "captured", after="zero")
stops, forgets = PassEntry(Stops, "captured", after="zero"), PassEntry(Forgets, "captured", after="zero")
misphased, reduces = PassEntry(Misphased, "captured", after="zero"), PassEntry(Reduces, "captured", after="zero")
misphased_late = PassEntry(Misphased, "local", after="bucket")

def room_for_ever(graph):
    graph.config.depth += 1

endless = RoomCheck("a maximum of 0", "the maximum is above 0", room_for_ever)
def room_in_place(graph):
    change(graph.program)
    graph.config.depth += 1

changes = RoomCheck("a maximum of 0", "the maximum is above 0", room_in_place)
breaks = RoomCheck("a maximum of 0", "the maximum is above 0", lambda graph: graph.config.no_such())
"""
)
REFUSED = r"plug-in '\w+' \(graphzero.{}: .*\) of the distribution others-plugin {}"


def two_layers(names: tuple[str, ...] = ("dp",), trains: bool = False) -> TrainGraph:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if trains else None
    return TrainGraph(model, mean_square, optimizer, placement=gz.placement("cpu", range(2), names=names, virtual=True))


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("raises", "stopped: KeyError: 'size'"),
        ("says_nothing", "stopped: TypeError: "),
        ("says_text", "stopped: TypeError: words for a plan are a list of texts, not 'text'"),
        ("differs", r"gave a program that best\(options\) has not made of the options that it gave"),
        ("other", "was to describe a program, and gave another one"),
        (
            "changes_captured",
            "changed the captured graph Train that it may only read, at 'addmm'; it may change g",
        ),
        ("changes_given", "changed the local graph Train that it may only read, at 'addmm'"),
        ("changes_made", "changed the local graph Train that it may only read, at 'addmm'"),
        ("changes_described", "changed the local graph Train that it may only read, at 'addmm'"),
    ],
)
def test_an_extension_of_plans_that_misbehaves_is_named(site: Site, target: str, problem: str) -> None:
    site("plans", "buckets", f"MODULE:{target}", text=BAD)
    graph = two_layers()
    graph.config.set_memory_budget(1)
    if target in ("other", "changes_described"):
        graph.config.set_memory_budget(10**6)
    with pytest.raises(gz.ConfigError, match=REFUSED.format("plans", problem)):
        graph.compile(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("no_marks", r"chose \(\(\), 'none'\); give marks, "),
        ("one_text", r"chose \('model.0@0', 'one'\); give marks, "),
        ("fails", "stopped: IndexError: no unit"),
    ],
)
def test_a_chooser_of_stages_that_misbehaves_is_named(site: Site, target: str, problem: str) -> None:
    site("stages", "halves", f"MODULE:{target}", text=BAD)
    graph = two_layers(("pp",))
    graph.config.set_stage("halves")
    with pytest.raises(gz.ConfigError, match=REFUSED.format("stages", problem)):
        graph.compile(torch.ones(2, 2))


def test_a_chooser_of_stages_that_changes_the_graph_changes_no_number(site: Site) -> None:
    site("stages", "halves", "MODULE:changes_the_graph", text=BAD)
    graph, plain = two_layers(("pp",)), two_layers()
    graph.config.set_stage("halves")
    for _ in range(2):
        torch.testing.assert_close(graph(torch.ones(2, 2)), plain(torch.ones(2, 2)))


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("breaks", "stopped: AttributeError"),
        ("endless", "has given a step"),
        ("changes", "changed the local graph Train that it may only read, at 'addmm'"),
    ],
)
def test_a_check_of_room_that_misbehaves_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch, target: str, problem: str
) -> None:
    monkeypatch.setattr("graphzero.graph.MOST_TIMES", 2)
    site("passes", "reserve", "MODULE:reserving", name="a-plugin", text=BAD)
    site("settings", "depth", "MODULE:setting", name="b-plugin", text=BAD)
    site("checks", "maximum", f"MODULE:{target}", text=BAD)
    with pytest.raises(gz.ConfigError, match=REFUSED.format("checks", problem)):
        two_layers()(torch.ones(2, 2))


def test_a_pass_that_misbehaves_in_the_list_is_named(site: Site) -> None:
    site("passes", "noop", "MODULE:asks_itself", text=BAD)
    with pytest.raises(gz.ConfigError, match=REFUSED.format("passes", "stopped: RecursionError")):
        two_layers().compile(torch.ones(2, 2))


def test_an_error_in_a_pass_of_others_says_its_distribution_and_the_line(site: Site) -> None:
    site("passes", "stops", "MODULE:stops", text=BAD)
    line = BAD[: BAD.index('graph.meta["stage"]')].count("\n") + 1
    problem = rf"stopped: AttributeError: .*, at .*others_plugin.py:{line} in __call__\n  Update it, or uninstall it"
    with pytest.raises(gz.ConfigError, match=REFUSED.format("passes", problem)):
        two_layers().compile(torch.ones(2, 2))


def test_a_pass_of_others_by_another_name_is_found_by_its_class(site: Site) -> None:
    site("passes", "renamed", "MODULE:renamed", text=BAD)
    with pytest.raises(gz.ConfigError, match=REFUSED.format("passes", "stopped: KeyError: 'x'")):
        two_layers().compile(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("forgets", "pass forgets of the distribution others-plugin returned NoneType"),
        ("misphased", "after pass misphased of the distribution others-plugin: 'use' has 'forwards' for a phase"),
        ("reduces", "after pass reduces of the distribution others-plugin: 'all_reduce' is a move at level captured"),
    ],
)
def test_a_pass_of_others_is_verified_whatever_its_base_and_its_distribution_is_said(
    site: Site, entry: str, problem: str
) -> None:
    site("passes", entry, f"MODULE:{entry}", text=BAD)
    with pytest.raises(gz.errors.VerifyError, match=problem):
        two_layers().compile(torch.ones(2, 2))


def test_drafts_of_a_program_verify_passes_of_others(site: Site) -> None:
    site("passes", "misphased", "MODULE:misphased_late", text=BAD)
    options = pass_list.Options(stage=2)
    graph = Pipeline(pass_list.default_passes(options, until="bucket"))(parse(step()))
    for draft in (
        lambda: run_unverified(graph.clone(), options, "bucket"),
        lambda: Pipeline(pass_list.default_passes(options, since="bucket"), verifies=False)(graph),
    ):
        with pytest.raises(gz.errors.VerifyError, match="after pass misphased of the distribution others-plugin"):
            draft()


def test_a_field_of_a_setting_that_is_not_there_is_refused(site: Site) -> None:
    site("passes", "misnamed", "MODULE:of_no_setting", text=BAD)
    with pytest.raises(
        gz.ConfigError, match=REFUSED.format("passes", "has a field of the setting 'limits', which no ")
    ):
        pass_names()


def test_a_method_of_several_settings_that_does_not_set_them_is_refused(site: Site) -> None:
    both = {"graphzero.settings": {"depth": "both:by_both", "width": "both:by_both"}}
    site("settings", "height", "MODULE:setting", name="a-plugin", text=BAD)
    folder = pathlib.Path(sys.path[0])
    install(folder, "others-plugin", {"both": BAD}, both)
    forget()
    config = gz.GraphConfig(gz.placement("cpu", [0], virtual=True))
    config.deepen(1)
    assert config.description == "depth=1, width=1"
    for depth in (-1, 0, 2):
        with pytest.raises(
            gz.ConfigError, match=REFUSED.format("settings", "has config.deepen give .* no dict of depth,")
        ):
            config.deepen(depth)
    assert config.description == "depth=1, width=1"


EXECUTORS = """
import torch
from graphzero.plugins.inductor.compiled import written
from graphzero.plugins.inductor.region_ops import join

class Plain:
    def __init__(self, world):
        self.world = world
    def join(self, graph):
        return join(graph)
    def region_function(self, op, local):
        module, _ = written(op.region, self.world, local)
        return lambda operands: self.finish(list(module(*operands)))
    def finish(self, results):
        return results

class StopsFirst(Plain):
    def __init__(self, world):
        raise ValueError("no compiler")

class JoinsNothing(Plain):
    def join(self, graph):
        pass

class JoinsInPlace(Plain):
    def join(self, graph):
        next(node for node in graph.nodes if node.op == "call_function").name = "first"
        return graph

class Drops(Plain):
    def join(self, graph):
        joined = join(graph)
        joined.set_output(joined.outputs, joined.aux, {})
        return joined

class HasNoFunction(Plain):
    def region_function(self, op, local):
        pass

class StopsLate(Plain):
    def finish(self, results):
        return results[99]

class GivesFewer(Plain):
    def finish(self, results):
        return results[:-1]

class Rounds(Plain):
    def finish(self, results):
        return [x.half() for x in results]
"""


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("StopsFirst", "stopped: ValueError: no compiler, at .* in __init__"),
        ("JoinsNothing", r"has join\(graph\) give None, not a copy of the graph with regions"),
        ("JoinsInPlace", "changed the local graph Train that it may only read, at 'first'"),
        ("Drops", r"has join\(graph\) give a program of other ends: the new value of model_0_bias, the new value of "),
        ("HasNoFunction", "has region_function give None, which cannot be called"),
        ("StopsLate", "stopped: IndexError: list index out of range, at .* in finish"),
        ("GivesFewer", r"has a region give .*, which is to give torch.float32 of \[1, 2\], "),
        ("Rounds", r"has a region give torch.float16 of \[1, 2\], .*, which is to give torch.float32 of \[1, 2\], "),
    ],
)
def test_an_executor_that_misbehaves_is_named(site: Site, target: str, problem: str) -> None:
    site("executors", "other", f"MODULE:{target}", text=EXECUTORS)
    graph = two_layers(trains=True)
    graph.config.set_executor("other")
    with pytest.raises(gz.ConfigError, match=REFUSED.format("executors", problem)):
        graph(torch.ones(2, 2))


def test_an_executor_of_others_computes_what_eager_does(site: Site) -> None:
    site("executors", "other", "MODULE:Plain", text=EXECUTORS)
    graph, plain = two_layers(trains=True), two_layers(trains=True)
    graph.config.set_executor("other")
    for _ in range(2):
        assert torch.equal(graph(torch.ones(2, 2)), plain(torch.ones(2, 2)))
