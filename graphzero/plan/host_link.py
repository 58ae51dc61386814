"""The link between a device and host memory, as the search for what waits on the host prices it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphzero.ir import value
from graphzero.ir.storage.liveness import Liveness
from graphzero.plan.device import Device
from graphzero.plan.seconds import seconds_of


@dataclass(frozen=True)
class HostLink:
    """The link to the host: copies cost a step what of them takes longer than the compute of a phase.

    bandwidth: bytes a second in each direction.  begin: seconds that it takes to begin a copy.  forward, backward:
    seconds of these phases that hide copies.
    """

    bandwidth: float
    begin: float
    forward: float
    backward: float

    @classmethod
    def from_program(cls, at: Liveness, device: Device) -> HostLink:
        """The link of a device for a local program; a CPU copies itself, and hides nothing."""
        if device.type == "cpu":
            return cls(device.memory / 2, device.call, 0.0, 0.0)
        seconds = {"forward": 0.0, "backward": 0.0}
        for node in at.nodes:
            if (phase := value.phase_of(node)) in seconds and node.op == "call_function":
                seconds[phase] += seconds_of(at, node, device)
        return cls(device.host_link().bandwidth, device.call, **seconds)

    def seconds(self, sizes: Sequence[int]) -> float:
        """Seconds that a step takes longer if values of these bytes go and come back."""
        copying = sum(sizes) / self.bandwidth
        exposed = max(copying - self.forward, 0.0) + max(copying - self.backward, 0.0)
        return exposed + 2 * self.begin * len(sizes)
