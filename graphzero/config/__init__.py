"""Settings of one Graph: each one is a field of a frozen dataclass, which ``graph.config`` replaces.

``setting`` says what a setting is, ``settings`` lists them, ``graph_config`` is the user's object,
``plugin_settings`` are those of plug-ins.  Passes, capture and the runtime read ``config.settings``.
"""

from graphzero.config.amp import AmpSettings
from graphzero.config.graph_config import GraphConfig
from graphzero.config.offload import OffloadSettings
from graphzero.config.plugin_settings import PluginSetting, PluginValue
from graphzero.config.setting import Check
from graphzero.config.settings import Settings
from graphzero.config.zero import ZeroSettings
from graphzero.plan.stage import AUTO
