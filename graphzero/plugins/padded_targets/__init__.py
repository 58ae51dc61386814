"""A loss over a slice of a split sequence is computed over all of it, with targets that it ignores."""

from graphzero.passes import PassEntry
from graphzero.plugins.padded_targets.pad_targets import PadTargets

PASS = PassEntry(PadTargets, "captured", after="split_attention")
