"""How much slower an unmeasured network may be than its data sheet.

Networks are of two modes: most give what their sheet says within a few percent, and hardly more; the others are several times slower
(another transport than the cards could run, cards that were not all used). So it is an upper end that is known, not a width around
the middle. Where NCCL needs a plugin to reach the cards, it may be missing or old, and without it all goes over TCP; Amazon's comes
with its machines' images.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, Literal

from pydantic import Field

from simulator.base.errors import CalibrationError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import Strict
from simulator.spec.cluster.parts import InterKind

Carrier = Literal["verbs", "efa", "plugin", "tcp"]  # verbs: what NCCL speaks itself; plugin: what it needs one for
_CARRIERS: Final[dict[InterKind, Carrier]] = {
    "efa": "efa",
    "ethernet": "tcp",
    **dict.fromkeys(("slingshot", "omnipath", "tcpx", "tcpxo"), "plugin"),
}
FILE: Final = TOPOLOGIES / "calibrations" / "networks.json"


class SlowNetwork(Strict):
    """The slow end of published networks, which one in twenty exceeds.

    slow_bytes, slow_waits: factors on the time of bytes and of what calls wait beside, over `nodes` nodes. per_doubling: logarithm
    of a further factor for each doubling of the nodes beyond. held: the share of networks below the end that other sources say.
    sample: machine -> least and largest factor that it showed.
    """

    source: str
    slow_bytes: dict[Carrier, float]
    slow_waits: dict[Carrier, float]
    per_doubling: float = Field(ge=0)
    nodes: int = Field(ge=2)
    held: float = Field(ge=0, le=1)
    sample: dict[str, dict[str, tuple[float, float]]]

    def beyond(self, num_nodes: int) -> float:
        """What more nodes than those of most sweeps make of both factors."""
        return math.exp(self.per_doubling * math.log2(max(1.0, num_nodes / self.nodes)))


def carrier_of(kind: InterKind) -> Carrier:
    """Whose slow end is that of a network of that kind."""
    return _CARRIERS.get(kind, "verbs")


@lru_cache(maxsize=1)
def slow_network() -> SlowNetwork:
    """The prior shipped with the project. Raises CalibrationError with every fault."""
    return SlowNetwork.of_json(FILE, CalibrationError)
