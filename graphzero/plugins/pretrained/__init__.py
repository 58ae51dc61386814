"""Weights that come and go: modules on the meta device get values, and files of other tools are read and written."""

from graphzero.plugins.pretrained.load import load_pretrained
from graphzero.plugins.pretrained.meta_modules import materialize
from graphzero.plugins.pretrained.save import save_pretrained

__all__ = ["load_pretrained", "materialize", "save_pretrained"]
