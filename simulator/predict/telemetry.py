"""Utilisation of each part of the machine in a step: bytes and busy time against capacity, over time.

A counter belongs to one rank, or to its node where all ranks of a node share the part (host memory, drives). Bytes are
those that must move: a kernel reads and writes each operand once, a collective sends what its algorithm sends. Rates are
against data sheets; drives and host memory, against what the host's tier reaches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import ceil, fsum
from statistics import NormalDist
from typing import Any, Final

from simulator.base.sums import summed
from simulator.parallel.mesh import GroupShape
from simulator.play.lower import lowered
from simulator.play.lower.messages import role_of
from simulator.predict.prediction import Prediction
from simulator.predict.rank_work import RankWork, rank_works
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.tiers import CPU_ADAM, HOST_MEMORY, NVME_READ, NVME_WRITE
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.collectives import KINDS, host_traffic
from simulator.work.program import COMPUTE_STREAM, Collective, Program
from simulator.work.trace import Span

AIO_BLOCK_BYTES: Final = (
    1 << 20
)  # one request to a drive: DeepSpeed 0.16 runtime/swap_tensor/constants.py, aio.block_size
AIO_QUEUE_DEPTH: Final = 8  # requests that a rank has on their way at most: the same file, aio.queue_depth
_TIERS: Final = {HOST_MEMORY: "host memory", CPU_ADAM: "cpu adam", NVME_READ: "nvme read", NVME_WRITE: "nvme write"}
_PEER: Final = ("to_peer", "from_peer")

Rates = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One part of the machine in a step.

    amount: in the step, in `unit`; capacity: per second. rates: (time, amount per second from then on) over the step as
    played, which may leave out micro-batches that repeat; empty where only the step's sum is known.
    """

    name: str
    unit: str
    amount: float
    capacity: float
    step_s: float
    rates: Rates = ()

    @property
    def mean(self) -> float:
        """Share of the capacity over the whole step."""
        return self.amount / (self.capacity * self.step_s)

    @property
    def peak(self) -> float:
        """The highest share at any moment of the step; its mean, where only that is known."""
        return max((self.share(rate) for _, rate in self.rates), default=self.mean)

    def share(self, rate: float) -> float:
        """Of the capacity. An op's bytes are spread evenly over its time, so two that overlap may seem to exceed it."""
        return min(rate / self.capacity, 1.0)

    def percentile(self, share: float) -> float:
        """The share of the capacity that is not exceeded for this share of the step's time."""
        spans = sorted((rate, until - at) for (at, rate), (until, _) in pairwise(self.rates))
        left = share * summed(seconds for _, seconds in spans)
        for rate, seconds in spans:
            left -= seconds
            if left <= 0:
                return self.share(rate)
        return self.peak


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramUse:
    """One class of ranks: a pipeline stage, or ranks with equal GPUs. queue: requests to a node's drives, by time."""

    name: str
    num_ranks: int
    uses: tuple[Use, ...]
    queue: Rates = ()

    def of(self, name: str) -> Use:
        """The use of one part. Raises KeyError."""
        return {use.name: use for use in self.uses}[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Counters of a step by class of ranks, rates, and how steps of a run differ.

    samples_per_s: sequences. steps_s: percentile -> seconds of a step, where ranks' times vary by `jitter` (one sigma,
    relative) from step to step: a step takes as long as its slowest rank.
    """

    programs: tuple[ProgramUse, ...]
    samples_per_s: float
    tokens_per_s: float
    jitter: float = 0.0
    steps_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def busiest(self) -> dict[str, tuple[Use, str]]:
        """Part -> its use by the class of ranks that uses it most, and that class's name."""
        found: dict[str, tuple[Use, str]] = {}
        for program in self.programs:
            for use in program.uses:
                if use.name not in found or use.mean > found[use.name][0].mean:
                    found[use.name] = use, program.name
        return found

    def report(self) -> dict[str, Any]:
        """Plain data, as `--json` shows it."""
        return {
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "jitter": self.jitter,
            "steps_s": dict(self.steps_s),
            "programs": [
                {
                    "name": program.name,
                    "num_ranks": program.num_ranks,
                    "utilisation": [_as_json(use) for use in program.uses],
                    "nvme_queue_mean": _mean(program.queue),
                    "nvme_queue_peak": max((depth for _, depth in program.queue), default=0.0),
                }
                for program in self.programs
            ],
        }


def _as_json(use: Use) -> dict[str, Any]:
    shares = {"mean": use.mean, "p50": None, "p95": None, "peak": None}
    if use.rates:
        shares |= {"p50": use.percentile(0.5), "p95": use.percentile(0.95), "peak": use.peak}
    return {"name": use.name, "unit": use.unit, "amount": use.amount, "capacity_per_s": use.capacity, **shares}


def _mean(rates: Rates) -> float:
    whole_s = rates[-1][0] - rates[0][0] if rates else 0.0
    area = summed(rate * (until - at) for (at, rate), (until, _) in pairwise(rates))
    return area / whole_s if whole_s else 0.0


def telemetry(
    prediction: Prediction,
    model: Model,
    plan: Plan,
    cluster: Cluster,
    calibration: Calibration | None = None,
    stack: Stack | None = None,
    *,
    jitter: float = 0.0,
) -> Telemetry:
    """The counters of a predicted step. Inputs and errors are those of `predict`."""
    lowering = lowered(model, plan, cluster, calibration, stack)
    works = rank_works(lowering)
    played = lowering.programs(prediction.num_played)
    return Telemetry(
        programs=tuple(_Reading(prediction, *one).read() for one in zip(works, played, strict=True)),
        samples_per_s=plan.tokens_per_step / plan.seq_len / prediction.step_s,
        tokens_per_s=prediction.tokens_per_s,
        jitter=jitter,
        steps_s=step_percentiles(prediction.step_s, plan.num_devices, jitter),
    )


def step_percentiles(step_s: float, num_ranks: int, jitter: float) -> dict[str, float]:
    """Percentiles of a step that ends with the slowest of `num_ranks`, whose times are normal around their mean.

    All lie below x with probability F(x)^n, so the p-th percentile is one rank's at p^(1/n). step_s is the median.
    """
    if not jitter:
        return {}

    def slowest(share: float) -> float:
        return 1 + jitter * NormalDist().inv_cdf(share ** (1 / num_ranks))

    return {f"p{share:g}": step_s * slowest(share / 100) / slowest(0.5) for share in (5, 50, 90, 95, 99)}


class _Reading:
    """One class of ranks: its whole step for amounts, the step as played for when."""

    def __init__(self, prediction: Prediction, work: RankWork, played: Program) -> None:
        self._work, self._lowering, self._cluster = work, work.lowering, work.lowering.cluster
        self._stage, self._ops = work.stage, {op.id: op for op in played.ops}
        self._step_s, self._peak = prediction.step_s, prediction.peak_flop_per_s
        self._spans, self._end_s = prediction.timeline.of(played.name), float(prediction.timeline.step_s)
        self._traffic: dict[tuple[str, str, int], Mapping[str, float]] = {}

    def read(self) -> ProgramUse:
        amounts, moments = self._amounts(), self._moments()
        uses = [
            Use(
                name=name,
                unit=unit,
                amount=amounts[name],
                capacity=capacity,
                step_s=self._step_s,
                rates=_rates(moments[name], self._end_s),
            )
            for name, (unit, capacity) in self._capacities().items()
            if amounts[name] or name in ("sm", "tensor", "hbm")
        ]
        host_s = summed(times * float(op.host_s) for times, op in self._work.ops)
        uses.append(Use(name="host", unit="s", amount=host_s, capacity=1.0, step_s=self._step_s))
        queue = _rates(self._requests(), self._end_s)
        return ProgramUse(
            name=self._work.program.name, num_ranks=self._work.program.num_ranks, uses=tuple(uses), queue=queue
        )

    def _capacities(self) -> dict[str, tuple[str, float]]:
        """Part -> (unit, what it can do a second), in the order in which people see them."""
        cluster, link, transfers = self._cluster, self._cluster.host_link, self._lowering.transfers
        found = {"sm": ("s", 1.0), "tensor": ("flop", self._peak)}
        found["hbm"] = ("bytes", float(self._lowering.device.memory_bytes_per_s))
        if cluster.intra.shape != "pcie":
            found["nvlink"] = ("bytes", cluster.intra.bytes_per_s)
        if link is not None:
            found |= dict.fromkeys(("pcie up", "pcie down"), ("bytes", link.bytes_per_s))
        if cluster.inter is not None:
            found["nic"] = ("bytes", cluster.node_bytes_per_s / cluster.gpus_per_node)
        if transfers is not None:
            tier = transfers.tier.links(vectorised=transfers.vectorised)
            found |= {
                counter: ("numel" if name == CPU_ADAM else "bytes", tier[name]) for name, counter in _TIERS.items()
            }
        return found

    def _amounts(self) -> dict[str, float]:
        """Sums of the whole step."""
        found: dict[str, float] = defaultdict(float)
        for times, op in self._work.ops:
            if isinstance(op, Collective):
                _add(found, self._loads(op), times)
        for kind, role, size_bytes, count in self._work.exchanges:
            _add(found, self._collective(kind, role, size_bytes), count)
        for one in self._work.by_category.values():
            _add(found, {"tensor": one.flop, "hbm": one.hbm_bytes})
        nominal = summed(float(span.nominal_s) for span in self._computing)
        stretched = summed(float(span.end_s - span.start_s) for span in self._computing) / nominal if nominal else 1.0
        found["sm"] = stretched * self._work.compute_s
        return found

    @cached_property
    def _computing(self) -> list[Span]:
        return [span for span in self._spans if span.stream == COMPUTE_STREAM]

    # -- what an op moves

    def _loads(self, op: Collective) -> Mapping[str, float]:
        """Amounts of one op that is no compute, by part."""
        if op.kind in KINDS:
            role = role_of(op, self._stage)
            return {} if role is None else self._collective(op.kind, role, op.size_bytes)
        if op.kind in _PEER:
            return {"nvlink": op.size_bytes}
        found: dict[str, float] = {"pcie down": op.size_bytes} if op.kind == "h2d" else {}
        found |= {"pcie up": op.size_bytes} if op.kind == "d2h" else {}
        return found | {counter: float(op.cost.link_bytes.get(name, 0)) for name, counter in _TIERS.items()}

    def _collective(self, kind: str, role: str, size_bytes: int) -> Mapping[str, float]:
        """Amounts of one rank in a collective. It reads from HBM what it sends, and writes what it receives."""
        key = kind, role, size_bytes
        if key not in self._traffic:
            self._traffic[key] = self._sent(kind, self._shape(role), size_bytes)
        return self._traffic[key]

    def _shape(self, role: str) -> GroupShape:
        """How the group lies on the nodes."""
        if not role.startswith("pp "):
            return self._lowering.fabric.shape(role)
        return self._lowering.mesh.pair_shape(self._stage, int(role.rpartition(" ")[2]))

    def _sent(self, kind: str, shape: GroupShape, size_bytes: int) -> Mapping[str, float]:
        if shape.num_ranks == 1:
            return {}
        lowering, by_pcie = self._lowering, self._cluster.intra.shape == "pcie"
        sent = host_traffic(kind, size_bytes, shape, self._cluster, lowering.curves, nccl=lowering.fabric.nccl)
        port, network, pcie = map(float, (sent.port_bytes, sent.network_bytes, sent.pcie_bytes))
        own = {} if by_pcie else {"nvlink": port}
        return {
            **own,
            "nic": network / (self._cluster.fabric.nic_compression or 1),
            "pcie up": pcie,
            "pcie down": pcie,
            "hbm": 2 * (port + network),
        }

    # -- when

    def _moments(self) -> Mapping[str, list[tuple[float, float, float]]]:
        """Part -> (begin, end, amount per second) of everything that uses it. Inside folded compute evenly over it."""
        found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        for span in self._spans:
            op, begin, end = self._ops.get(span.id), float(span.start_s), float(span.end_s)
            if op is None:  # waiting for data
                continue
            if isinstance(op, Collective):
                begin, amounts = float(span.joined_s or begin), self._loads(op)
            else:
                amounts = self._computed(span) | {"sm": end - begin}
            for name, amount in amounts.items():
                if amount and end > begin:
                    found[name].append((begin, end, amount / (end - begin)))
        return found

    def _computed(self, span: Span) -> dict[str, float]:
        """FLOP and bytes of a span, by what its categories do a second, and its share of the collectives inside of compute."""
        found: dict[str, float] = {}
        for category, part_s in span.parts:
            one = self._work.by_category[category]
            _add(found, {"tensor": one.flop, "hbm": one.hbm_bytes}, float(part_s) / one.seconds if part_s else 0.0)
        _add(found, self._inside, float(span.nominal_s) / self._work.compute_s)
        return found

    @cached_property
    def _inside(self) -> dict[str, float]:
        """Amounts of the collectives inside of compute."""
        found: dict[str, float] = {}
        for kind, role, size_bytes, count in self._work.exchanges:
            _add(found, self._collective(kind, role, size_bytes), count)
        return found

    def _requests(self) -> Iterator[tuple[float, float, float]]:
        """Requests to a node's drives on their way: a rank has as many as its queue takes, until its blocks run out."""
        transfers = self._lowering.transfers
        for span in self._spans:
            op = self._ops.get(span.id)
            if transfers is not None and isinstance(op, Collective) and op.kind in ("nvme_read", "nvme_write"):
                depth = min(AIO_QUEUE_DEPTH, ceil(op.size_bytes / AIO_BLOCK_BYTES))
                yield float(span.start_s), float(span.end_s), depth * transfers.ranks_per_node


def _add(found: dict[str, float], amounts: Mapping[str, float], times: float = 1.0) -> None:
    for name, amount in amounts.items():
        found[name] = found.get(name, 0.0) + times * amount


def _rates(moments: Iterable[tuple[float, float, float]], end_s: float) -> Rates:
    """(time, sum of the rates from then on) of what begins and ends, from 0 to the end of the step."""
    edges: dict[float, list[float]] = {0.0: [], end_s: []}
    for begin, end, rate in moments:
        edges.setdefault(begin, []).append(rate)
        edges.setdefault(end, []).append(-rate)
    if len(edges) == 2 and not any(edges.values()):
        return ()
    found: list[tuple[float, float]] = []
    active: list[float] = []
    for at in sorted(edges):
        for rate in edges[at]:
            if rate < 0:
                active.remove(-rate)
            else:
                active.append(rate)
        found.append((at, fsum(active)))
    return tuple(found)
