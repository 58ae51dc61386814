"""Checks of what a user gives a Graph: attributes, a build, optimizers, schedulers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from graphzero.capture.problems import find_refusal
from graphzero.config import GraphConfig
from graphzero.errors import ConfigError, shorten_repr
from graphzero.sbp.placement import Placement

RESERVED = (
    "config", "placement", "program", "history", "plan", "grad_norm", "skipped", "loss_scale", "is_compiled",
    "training", "learning_rates",
)  # fmt: skip
_OWN = ("config", "placement", "name")
_INNER = ("_source", "_selection", "_checkpoints", "_steps")  # a Graph sets them once


def check_attribute(graph: type, name: str, value: Any, constructed: bool) -> None:
    """Refuse objects that cannot be attributes of a Graph."""
    if isinstance(value, nn.Module) and not constructed:
        raise ConfigError(f"self.{name} = ...: call super().__init__() first in {graph.__name__}.__init__")
    if constructed and name in (*RESERVED, *_INNER):
        raise ConfigError(f"self.{name} is the Graph's own ({', '.join(RESERVED)}); give yours another name")
    if isinstance(value, nn.Module) and any(base.__name__ == "OptimizedModule" for base in type(value).__mro__):
        raise ConfigError(
            f"self.{name} is compiled by torch.compile, and a Graph compiles the whole step; give the module itself "
            '(the one before compiling, or model._orig_mod), and say config.set_executor("inductor") to have torch '
            "compile"
        )
    if isinstance(value, nn.Module) and (refusal := find_refusal(value)):
        raise ConfigError(f"self.{name} is {'; '.join(refusal)}")
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if any(isinstance(item, nn.Module) for item in inside):
        raise ConfigError(
            f"self.{name} is a {type(value).__name__} of modules, which has no parameters itself; use "
            "nn.ModuleList or nn.ModuleDict"
        )


def own_config(config: object, placement: Placement) -> GraphConfig:
    """A copy of the settings that a Graph is given.  Raises ConfigError for what is none, or for other ranks."""
    if not isinstance(config, GraphConfig):
        raise ConfigError(
            f"Graph(config={type(config).__name__}): give a GraphConfig, as gz.GraphConfig.from_deepspeed(path) makes "
            "it; other settings are made after super().__init__(), by self.config"
        )
    if config.placement != placement:
        raise ConfigError(
            f"Graph(config=...): its settings are for {config.placement!r}, the Graph is on {placement!r}; leave the "
            "Graph's placement out, or make the configuration for that one"
        )
    return copy.copy(config)


def check_names(graph: type, base: type) -> None:
    """Refuse a class whose own names would take the place of what ``base`` calls itself by."""
    inner = {name for name in (*vars(base), *_INNER) if name.startswith("_") and not name.startswith("__")}
    if taken := sorted(inner & vars(graph).keys()):
        raise ConfigError(
            f"{graph.__name__} defines {', '.join(taken)}, which every Graph has for itself; give yours another name"
        )


def missing_attribute(graph: type, name: str, constructed: bool) -> Exception:
    """Say why a Graph has no such attribute."""
    if not constructed and (name in _OWN or (name.startswith("_") and not name.startswith("__"))):
        return ConfigError(f"{graph.__name__}.__init__ must call super().__init__() before the Graph is used")
    ask = f"; a Graph is not a module: ask its modules, as graph.model.{name}" if hasattr(nn.Module, name) else ""
    return AttributeError(f"{graph.__name__!r} object has no attribute {name!r}{ask}")


def check_build(graph: type, build: Any) -> None:
    """Refuse a ``build`` that is not a plain method.  Raises ConfigError."""
    name = f"{graph.__name__}.build"
    if not callable(build):
        raise ConfigError(
            f"{name} is of type {type(build).__name__}; write the step as a method: def build(self, x, y): ..."
        )
    if inspect.isgeneratorfunction(build) or inspect.isasyncgenfunction(build):
        raise ConfigError(f"{name} is a generator (it has yield), but one call is one step; return its results instead")
    if inspect.iscoroutinefunction(build):
        raise ConfigError(f"{name} is async, but a step waits for nothing; write def build(self, ...) without async")
    try:
        inspect.signature(build)
    except ValueError:
        raise ConfigError(f"{name} takes no arguments, not even self; write def build(self, ...)") from None


def check_optimizer(optim: object, others: list[torch.optim.Optimizer]) -> None:
    if not isinstance(optim, torch.optim.Optimizer):
        raise ConfigError(f"add_optimizer({type(optim).__name__}): give a torch.optim.Optimizer")
    if not hasattr(optim, "param_groups"):
        raise ConfigError(
            f"add_optimizer({type(optim).__name__}): it has no param_groups, as one around another that does without "
            "Optimizer.__init__; give the inner optimizer, or super().__init__(inner.param_groups, inner.defaults)"
        )
    params = {id(p) for group in optim.param_groups for p in group["params"]}
    for i, other in enumerate(others):
        shared = sum(id(p) in params for group in other.param_groups for p in group["params"])
        if shared:
            raise ConfigError(
                f"add_optimizer({type(optim).__name__}): {shared} of its parameters belong to optimizer {i} "
                f"({type(other).__name__}) too; a parameter has one optimizer, so split them among param groups"
            )


def check_scheduler(scheduler: Any, optim: torch.optim.Optimizer) -> None:
    if scheduler is None:
        return
    kind = type(scheduler).__name__
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            f"add_optimizer(lr_sch={kind}): its step takes a metric, which the Graph does not have; leave lr_sch out "
            "and call scheduler.step(metric) between calls, the new rate is read in the next one"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigError(f"add_optimizer(lr_sch={kind}): give a scheduler of torch.optim.lr_scheduler")
    needed = [
        p for p in inspect.signature(scheduler.step).parameters.values() if p.default is p.empty and p.kind in (0, 1)
    ]
    if needed:
        raise ConfigError(
            f"add_optimizer(lr_sch={kind}): its step needs {needed[0].name}, which the Graph does not have; leave "
            "lr_sch out and step it between calls"
        )
    if getattr(scheduler, "optimizer", optim) is not optim:
        raise ConfigError(
            f"add_optimizer(lr_sch={kind}): the scheduler belongs to another optimizer; make it with this one"
        )


def check_average(averaged: object, of: object, averages: Mapping[str, Any], others: Sequence[AveragedModel]) -> None:
    """averages: attributes of the Graph."""
    kind = type(averaged).__name__
    if not isinstance(averaged, AveragedModel):
        raise ConfigError(f"add_average({kind}, ...): give a torch.optim.swa_utils.AveragedModel")
    if any(averaged is other for other in others):
        raise ConfigError(f"add_average({kind}, ...): it is there already, and would follow its model twice in a step")
    inside = {id(child) for module in averages.values() if isinstance(module, nn.Module) for child in module.modules()}
    for name, module in (("the average", averaged), ("the module of which it is one", of)):
        if id(module) not in inside:
            raise ConfigError(
                f"add_average({kind}, {type(of).__name__}): {name} is not a module of the Graph; assign it to an "
                "attribute first: self.average = AveragedModel(self.model)"
            )


def check_no_others(others: Mapping[str, Any]) -> None:
    """Refuse arguments that add_optimizer does not have."""
    for name in others:
        raise ConfigError(
            f"add_optimizer has no argument {name!r}; it takes an optimizer, lr_sch= (its scheduler), clip_grad_norm=, "
            "norm_type= and clip_grad_value="
        )


def check_name(name: object) -> None:
    """Refuse what is not a name of a Graph."""
    if name is not None and not (isinstance(name, str) and name):
        raise ConfigError(f"Graph(name={shorten_repr(name)}): give a text, or leave it out")


def check_clipping(norm_type: float, **limits: float | None) -> None:
    for name, number in {"norm_type": norm_type, **limits}.items():
        is_positive = isinstance(number, (int, float)) and not isinstance(number, bool) and number > 0
        if not is_positive and (number is not None or name == "norm_type"):
            raise ConfigError(f"add_optimizer({name}={shorten_repr(number)}): give a positive number, or leave it out")
