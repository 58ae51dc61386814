"""Every field of the settings: its default, its check, what follows from it for programs and ranks, and its texts."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from typing import Any

import pytest
import torch

import graphzero as gz
from graphzero.config import AmpSettings, GraphConfig, OffloadSettings, PluginValue, Settings, ZeroSettings
from graphzero.config.members import plugin_members
from graphzero.config.named import InputSbp, UserPass
from graphzero.config.plugin_settings import plugin_settings
from graphzero.config.setting import Checked, Setting, settings_of
from graphzero.config.stages import AutoStages, StageMark
from graphzero.plugins.ragged.shapes import shapes_of

WRONG = (object(), -1, 2.5, "nothing of the kind", (object(),))
OTHER = (
    False, True, 1, 4096, ("dp",), ("*",), ZeroSettings(3, ("dp",)), (gz.Link(1e-6, 1e9),),
    (InputSbp("x", (gz.sbp.B,)),), (UserPass(abs, "zero"),), AmpSettings(torch.bfloat16), torch.float16, 0.25, 8.0,
    OffloadSettings(True),
    shapes_of({"x": {0: "rows"}}, {"rows": 8}, None), (StageMark("model", None, 0),), AutoStages(2),
    (PluginValue("shapes", shapes_of({"x": {0: "rows"}}, {"rows": 8}, None)),),
)  # fmt: skip
EVERY = [(Settings, one) for one in settings_of(Settings).values()]
EVERY += [(ZeroSettings, one) for one in settings_of(ZeroSettings).values()]
EVERY += [(AmpSettings, one) for one in settings_of(AmpSettings).values()]
each = pytest.mark.parametrize(("kind", "one"), EVERY, ids=[f"{kind.__name__}.{one.name}" for kind, one in EVERY])
ALL = [one for one in settings_of(Settings).values() if one.name != "plugins"] + [*plugin_settings().values()]
each_of_all = pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)


def another(one: Setting) -> Any:
    """A right value that is not the default: of a choice one that its message names, else one of ``OTHER``."""
    named = re.findall(r"'(\w+)'", one.check.allowed)
    return next(x for x in (*named, *OTHER) if one.check.is_met(x) and x != one.default)


def changed(kind: type[Checked], one: Setting) -> Any:
    start = ZeroSettings(stage=3) if one.name == "keep_gathered" else kind()
    if one.name in plugin_settings():
        return dataclasses.replace(start, plugins=(PluginValue(one.name, another(one)),))
    return dataclasses.replace(start, **{one.name: another(one)})


def config() -> GraphConfig:
    return GraphConfig(gz.placement("cpu", range(4), virtual=True))


# ---- a field by itself


@each
def test_a_default_meets_its_own_check(kind, one):
    assert one.check.is_met(one.default) and getattr(kind(), one.name) == one.default


@each
def test_a_wrong_value_is_refused_with_the_setting_what_is_allowed_and_the_value(kind, one):
    wrong = [x for x in WRONG if not one.check.is_met(x)]
    assert len(wrong) > 2
    for value in wrong:
        with pytest.raises(gz.ConfigError) as caught:
            kind(**{one.name: value})
        said = one.said.format(repr(value)) or f"config.{one.name} = {value!r}"
        assert str(caught.value) == f"{said}: {one.check.allowed}" and repr(value) in said


@each
def test_settings_are_equal_exactly_when_every_field_is(kind, one):
    assert changed(kind, one) != kind() and changed(kind, one) == changed(kind, one)
    assert hash(changed(kind, one)) == hash(changed(kind, one))
    assert repr(changed(kind, one)) != repr(kind())


@each
def test_nothing_changes_a_field_in_place(kind, one):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(kind(), one.name, one.default)


# ---- what follows for programs and ranks


@each_of_all
def test_a_change_is_of_the_fingerprint_exactly_if_it_may_change_the_program(one):
    assert (changed(Settings, one).fingerprint != Settings().fingerprint) == one.in_program
    assert hash(changed(Settings, one).fingerprint) == hash(changed(Settings, one).fingerprint)


@each_of_all
def test_ranks_compare_every_setting(one):
    found = changed(Settings, one)
    assert found.description == f"{one.name}={found.texts[one.name]}" and Settings().description == ""
    assert " at 0x" not in found.description


class Double(gz.Graph):
    def build(self, x):
        return 2 * x


@pytest.mark.parametrize(
    "one", [one for one in settings_of(Settings).values() if not one.in_program], ids=lambda one: one.name
)
def test_a_setting_that_changes_no_program_compiles_none(one):
    graph = Double(gz.placement("cpu", range(2), virtual=True))
    program = graph.compile(torch.ones(2)).program
    setattr(graph.config, one.name, another(one))
    assert graph.compile(torch.ones(2)).program is program


def test_a_pass_counts_by_identity():
    class Equal:
        def __call__(self, graph):
            return graph

        def __eq__(self, other):
            return True

        __hash__ = None

    one, other = Equal(), Equal()
    assert UserPass(one, "zero") == UserPass(one, "zero") != UserPass(one, "pin")
    assert Settings(user_passes=(UserPass(one, "zero"),)) != Settings(user_passes=(UserPass(other, "zero"),))
    assert hash(UserPass(one, "zero")) == hash(UserPass(one, "zero"))


# ---- what the user has of it


@each_of_all
def test_the_user_reads_it_and_sets_it_in_one_way_that_has_a_text(one):
    member = (vars(GraphConfig) | plugin_members(GraphConfig))[one.name]
    assert inspect.getdoc(member) and getattr(config(), one.name) == ({} if one.name == "inputs" else one.default)
    assert (member.fset is None) == bool(one.method)
    assert not one.method or inspect.getdoc(getattr(GraphConfig, one.method))


@each_of_all
def test_a_wrong_value_from_the_user_changes_nothing(one):
    graph_config = config()
    for value in WRONG:
        if one.check.is_met(value):
            continue
        with pytest.raises(gz.ConfigError, match=re.escape(repr(value))):
            if not one.method:
                setattr(graph_config, one.name, value)
            elif len(inspect.signature(method := getattr(graph_config, one.method)).parameters) == 1:
                method(value)
            else:
                setattr(graph_config, one.name, value)
    assert graph_config.settings == Settings()


@each_of_all
def test_a_copy_has_its_own(one):
    first = config()
    set_values = first._set_plugins if one.name in plugin_settings() else lambda values: first._set(**values)
    set_values({one.name: another(one)})
    second = copy.deepcopy(first)
    assert second.settings == first.settings and second.fingerprint == first.fingerprint
    second._settings = Settings()
    assert second.settings != first.settings


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("zero_stage", "enable_zero(...)"), ("executor", "set_executor(...)"), ("set_arena", "set_arena(...)"),
        ("bucket_size", "bucket_bytes"), ("max_program", "max_programs"), ("memory", "set_memory_budget(...)"),
    ],
)  # fmt: skip
def test_a_name_that_is_no_setting_is_refused_with_those_near_it(name, near):
    with pytest.raises(gz.ConfigError) as caught:
        setattr(config(), name, 3)
    text, _, guessed = str(caught.value).partition("Did you mean ")
    assert text == f"config.{name} = 3: there is no such setting. "
    assert near in guessed.split("? ")[0].split(" or ")


def test_a_name_near_to_none_is_refused_with_all():
    with pytest.raises(gz.ConfigError) as caught:
        config().xyz = 3
    text = str(caught.value)
    assert text.startswith("config.xyz = 3: there is no such setting. Settings are made by\n  enable_zero(...), ")
    assert all((f"{one.method}(...)" if one.method else one.name) in text for one in ALL)
