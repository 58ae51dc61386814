"""Several ops become one that computes the same, in less memory or time; each pass stands for itself."""

from graphzero.passes import PassEntry
from graphzero.plugins.fusion.fuse_accumulate import FuseAccumulate
from graphzero.plugins.fusion.fuse_adam import FuseAdam
from graphzero.plugins.fusion.fuse_cross_entropy import FuseCrossEntropy
from graphzero.plugins.fusion.fuse_pieces import FusePieces
from graphzero.plugins.fusion.join_updates import JoinUpdates

CROSS_ENTROPY = PassEntry(FuseCrossEntropy, "local", lambda options: options.optimise, "fuse", after="localize")
ACCUMULATE = PassEntry(
    FuseAccumulate, "local", lambda options: options.optimise and options.adds_up, "fuse", after="localize"
)
PIECES = PassEntry(FusePieces, "local", lambda options: options.optimise, "fuse", after="localize")
ADAM = PassEntry(FuseAdam, "local", lambda options: options.optimise, "fuse", after="localize")
UPDATES = PassEntry(JoinUpdates, "local", lambda options: options.optimise, after="in_place")
