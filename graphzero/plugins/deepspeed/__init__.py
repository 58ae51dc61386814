"""DeepSpeed's JSON as a configuration of a Graph: ``gz.GraphConfig.from_deepspeed``.

``keys`` says what becomes of each key; ``document`` reads; ``landing`` sets what is a setting; ``ported`` holds the
rest, made of ``batch``, ``optimizers`` and ``schedules``.
"""

from graphzero.plugins.deepspeed.document import Document
from graphzero.plugins.deepspeed.landing import land
from graphzero.plugins.deepspeed.ported import DeepSpeed

__all__ = ["DeepSpeed", "Document", "land"]
