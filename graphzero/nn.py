"""``gz.nn.Graph``: the Graph class under the name that users of torch.nn look for."""

from graphzero.graph import Graph

__all__ = ["Graph"]
