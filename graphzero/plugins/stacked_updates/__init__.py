"""Updates of whole matrices, as Muon makes them, done for a stack of matrices, of which each rank computes a share."""

from graphzero.passes import PassEntry
from graphzero.plugins.stacked_updates.stack_updates import StackUpdates

PASS = PassEntry(StackUpdates, "captured", after="count_targets")
