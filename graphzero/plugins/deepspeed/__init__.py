"""DeepSpeed's JSON as a configuration of a Graph: ``gz.GraphConfig.from_deepspeed``.

``reader`` is the plug-in.  ``keys`` says what becomes of each key; ``document`` reads; ``landing`` sets what is a
setting; ``ported`` holds the rest, made of ``batch``, ``optimizers`` and ``schedules``.
"""

from graphzero.plugins.deepspeed.ported import DeepSpeed

__all__ = ["DeepSpeed"]
