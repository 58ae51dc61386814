"""The settings of a Graph, one field each: a new one is a field here, and a method of GraphConfig if a call sets it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphzero.config.amp import AmpSettings
from graphzero.config.named import InputSbp, UserPass
from graphzero.config.offload import OffloadSettings
from graphzero.config.plugin_settings import PluginValue, plugin_settings
from graphzero.config.setting import (
    YES_OR_NO,
    Check,
    Checked,
    Setting,
    choices,
    one_of,
    setting,
    tuple_of,
    whole_number,
)
from graphzero.config.stages import AutoStages, StageMark
from graphzero.config.zero import ZeroSettings
from graphzero.errors import ConfigError
from graphzero.extensions import EXECUTORS, extensions
from graphzero.plan.stage import AUTO
from graphzero.sbp.link_costs import Link, Links
from graphzero.schedules import GENERATORS, PipelineSchedule

EAGER = "eager"
EXECUTOR = Check(  # which asks for no plug-ins as long as none is named
    lambda x: isinstance(x, str) and (x == EAGER or x in extensions(EXECUTORS)),
    lambda: choices((EAGER, *extensions(EXECUTORS))),
)
SCHEDULE = Check(
    lambda x: isinstance(x, PipelineSchedule) or (isinstance(x, str) and (x in GENERATORS or x.endswith(".csv"))),
    f"{choices(GENERATORS)}, or give rows of actions, or the path of a .csv file",
)


@dataclass(frozen=True, repr=False)
class Settings(Checked):
    """All settings of a Graph at one time."""

    zero: ZeroSettings = setting(
        ZeroSettings(),
        Check(lambda x: isinstance(x, ZeroSettings), "give its keyword arguments"),
        "enable_zero({})",
        doc="Stage, axes, shard_min_size and keep_gathered as ``enable_zero`` left them; stage 0 without it.",
    )
    amp: AmpSettings = setting(
        AmpSettings(),
        Check(lambda x: isinstance(x, AmpSettings), "give its keyword arguments"),
        "enable_amp({})",
        doc="Mixed precision as ``enable_amp`` left it; off without it.",
    )
    offload: OffloadSettings = setting(
        OffloadSettings(),
        Check(lambda x: isinstance(x, OffloadSettings), "give its keyword arguments"),
        "enable_offload({})",
        doc="What is in host memory as ``enable_offload`` left it; nothing without it.",
    )
    memory_budget: int | None = setting(
        None,
        whole_number(
            1,
            "give the bytes that one rank may have, an int of 1 or more, such as 20 * 2**30, or None for no budget",
            or_none=True,
        ),
        "set_memory_budget({})",
    )
    gradient_accumulation_steps: int = setting(
        1, whole_number(1, "give the number of micro-batches, 1 or more"), "set_gradient_accumulation_steps({})"
    )
    activation_memory: int | str | None = setting(
        None,
        Check(
            lambda x: x is None or (isinstance(x, str) and x == "checkpoint") or (type(x) is int and x >= 1),
            'give "checkpoint", the bytes that activations of one rank may take, an int of 1 or more, or None to hold '
            "them all",
        ),
        "set_activation_memory({})",
    )
    optimizer_in_backward: bool = setting(False, YES_OR_NO, "set_optimizer_in_backward({})")
    arena: bool = setting(True, YES_OR_NO, "set_arena({})")
    stages: tuple[StageMark, ...] = setting(
        (), tuple_of(StageMark, "give a module or a path, and its stage"), "set_stage({})"
    )
    auto_stages: AutoStages | None = setting(
        None,
        Check(lambda x: x is None or isinstance(x, AutoStages), "give the number of stages, or nothing"),
        'set_stage("auto", {})',
        doc='What ``set_stage("auto")``, or another chooser, was given; None without it.',
    )
    pipeline: str | PipelineSchedule = setting("1f1b", SCHEDULE, "set_pipeline({})")
    executor: str = setting(EAGER, EXECUTOR, "set_executor({})")
    cuda_graph: bool = setting(False, YES_OR_NO, "set_cuda_graph({})")
    check_inputs: str = setting(
        "always",
        one_of("always", "first", "values"),
        in_program=False,
        doc="""When ranks agree on the program: "always", before every call, or "first", before calls that compile or
        bind; in other calls only the program's hash is then compared.

        Inputs that must be equal on several ranks (0-d tensors, inputs that are B, a batch along the axes that do not
        split it) are compared too: up to 16 elements on the CPU whenever ranks agree, larger ones in the first two
        calls of a program, or, with "values", in every call, which reads all of them and waits for a GPU.
        """,
    )
    check_values: bool = setting(
        True,
        YES_OR_NO,
        doc="""Whether conditions on which build only raises (assert, torch._check) are checked in every step; True.

        A step whose check fails raises CheckError on every rank, before it has changed anything.  A check sends one
        truth value between the ranks, and on a GPU waits for it; False leaves all checks out.
        """,
    )
    bucket_bytes: int | None = setting(
        None,
        whole_number(1, "give a number of bytes, 1 or more, or None for the default", or_none=True),
        doc="""Most bytes of values in one bucket of collectives; a larger value is a bucket by itself.

        None, the default, is an eighth of the parameters' bytes, within 64 KiB and 4 MiB.
        """,
    )
    max_programs: int | None = setting(
        64,
        whole_number(1, "give a number of programs, 1 or more, or None for no bound", or_none=True),
        in_program=False,
        doc="""Number of compiled programs that the Graph keeps, 64 by default; beyond that, those used longest ago are
        dropped.

        A call that needs a dropped program compiles it again.  None sets no limit.
        """,
    )
    links: Links = setting(
        (),
        tuple_of(Link, "give a Link for each placement axis"),
        "set_links({})",
        doc="One Link per placement axis, outermost first, as ``set_links`` left them; () without it.",
    )
    inputs: tuple[InputSbp, ...] = setting(
        (), tuple_of(InputSbp, "give the name of an input, and its SBP"), "set_input({})"
    )
    plugins: tuple[PluginValue, ...] = setting(
        (),
        tuple_of(PluginValue, "set a plug-in's setting by its own name, config.NAME"),
        doc="Values of plug-ins' settings that are not as by default; each is a member of its own name too.",
    )
    user_passes: tuple[UserPass, ...] = setting(
        (),
        tuple_of(UserPass, "give a pass, and the name of the one that it follows"),
        "add_pass({})",
        doc="(pass, name of the pass it follows), in the order they were added.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cuda_graph and self.offload.is_on:
            raise ConfigError(
                "set_cuda_graph() and enable_offload(): a recorded step has its own streams, and copies to and "
                "from host memory have not been tried in one; leave one of them out"
            )

    @property
    def needs_budget(self) -> bool:
        """Whether something follows from the bytes that a rank may have, said or not."""
        return AUTO in (self.zero.stage, self.offload.activations)

    @property
    def _values(self) -> list[tuple[Setting, Any]]:
        """The settings with their values, those of plug-ins in the place of ``plugins``."""
        pairs: list[tuple[Setting, Any]] = []
        for one, value in super()._values:
            if one.name == "plugins":
                pairs += [(plugin_settings()[plugin.name], plugin.value) for plugin in self.plugins]
            else:
                pairs.append((one, value))
        return pairs

    def plugin_value(self, name: str) -> Any:
        """The value of a plug-in's setting.  Raises KeyError where no plug-in has one of that name."""
        default = plugin_settings()[name].default
        return next((plugin.value for plugin in self.plugins if plugin.name == name), default)
