"""How much of a step hangs on the network between nodes: the step played again on networks of other speeds."""

from __future__ import annotations

from typing import Final

from simulator.play.lower import Lowering
from simulator.predict.play import play
from simulator.predict.prediction import NetworkShare
from simulator.spec.calibration.networks import carrier_of, slow_network

_FREE: Final = 1e6  # times as fast: what is left of a collective is its latency
_TENTH_LESS: Final = 0.9


def network_share(lowering: Lowering, step_s: float, *, fold: bool = True) -> NetworkShare | None:
    """What `step_s`, the step as played, would lose and gain; None where no network joins the plan's devices."""
    if not lowering.over_nodes:
        return None

    def step_at(speed: float) -> float:
        return float(play(lowering.on_network(speed), fold=fold).step_s)

    hangs_s, more_s = step_s - step_at(_FREE), step_at(_TENTH_LESS) - step_s
    return NetworkShare(hangs_s=max(0.0, hangs_s), tenth_less_s=max(0.0, more_s))


def slow_s(lowering: Lowering, *, fold: bool = True) -> float:
    """The step on a network at the slow end of published ones (`spec.calibration.networks`): what is hidden may show there."""
    slow = slow_network()
    cluster = lowering.cluster
    assert cluster.inter is not None
    more = slow.beyond(cluster.num_devices // cluster.nvlink_domain_size)
    carrier = carrier_of(cluster.inter.kind)
    slower = lowering.on_network(1 / (slow.slow_bytes[carrier] * more), slow.slow_waits[carrier] * more)
    return float(play(slower, fold=fold).step_s)
