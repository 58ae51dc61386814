"""Settings of one Graph: each one is a field of a frozen dataclass, which ``graph.config`` replaces.

``setting`` says what a setting is, ``settings`` lists them, ``graph_config`` is the user's object,
``plugin_settings`` are those of plug-ins.  Passes, capture and the runtime read ``config.settings``.
"""

from graphzero.config.amp import AmpSettings as AmpSettings
from graphzero.config.graph_config import GraphConfig as GraphConfig
from graphzero.config.offload import OffloadSettings as OffloadSettings
from graphzero.config.plugin_settings import PluginSetting as PluginSetting
from graphzero.config.plugin_settings import PluginValue as PluginValue
from graphzero.config.setting import Check as Check
from graphzero.config.settings import Settings as Settings
from graphzero.config.zero import AUTO as AUTO
from graphzero.config.zero import ZeroSettings as ZeroSettings
