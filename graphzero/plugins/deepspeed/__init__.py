"""DeepSpeed's JSON as a configuration of a Graph: ``gz.GraphConfig.from_deepspeed``.

``landing`` is the plug-in, and sets what is a setting.  ``keys`` says what becomes of each key; ``document`` reads;
``ported`` holds the rest, made of ``optimizers`` and ``schedules``.
"""

from graphzero.plugins.deepspeed.ported import DeepSpeed

__all__ = ["DeepSpeed"]
