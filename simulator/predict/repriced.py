"""Recorded ops on another device, another fabric, in groups of another size: measured times by the ratio of two predictions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from simulator.base.errors import Fault, InputError, ShardwiseError
from simulator.base.kernels import Kernel
from simulator.parallel.mesh import GroupShape, Mesh
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.plan import Plan
from simulator.work.captured.kernels import priced
from simulator.work.captured.meetings import lattice
from simulator.work.captured.tensors import CapturedTensor
from simulator.work.collectives import choose
from simulator.work.recorded.recording import RecordedOp, Recording, scheduled

BY_SHAPE, BY_FLOP, BY_BYTES = "by its shapes", "by the devices' peak FLOP/s", "by the devices' memory bandwidth"
AS_IT_WAS, BY_FABRIC, BY_VOLUME = "as recorded", "by the collective model", "by the bytes of its ring"
_PRODUCTS = ("gemm", "attention", "scan")
_OVER_THE_HOST = re.compile(r"^Memcpy (HtoD|DtoH|PtoP)")
# Names of precisions in kernels of cuBLAS, CUTLASS, cuDNN and flash attention; what names none multiplies in bf16
_PRECISIONS = (
    ("fp8", "e4m3|e5m2|fp8|qmma"),
    ("tf32", "tf32|s1688"),
    ("fp16", "f16|half"),
    ("fp32", "sgemm|f32f32_f32f32|ffma"),
)
# A flash kernel's own operator has (batch, rows, heads, channels); the operator around it what `priced` knows
_FLASH: Final = {"_flash_attention_forward": "forward", "_flash_attention_backward": "backward"}

How = tuple[float, str]


@dataclass(slots=True)
class Tally:
    """How ops were repriced: method -> [ops, seconds before, seconds after]; names of ops without shapes -> count."""

    methods: dict[str, list[float]] = field(default_factory=dict)
    unshaped: Counter[str] = field(default_factory=Counter)

    def add(self, method: str, before_s: float, factor: float) -> None:
        """One op."""
        row = self.methods.setdefault(method, [0, 0.0, 0.0])
        row[0] += 1
        row[1] += before_s
        row[2] += before_s * factor


class DeviceRatio:
    """Time ratios of ops between a device and the recorded one."""

    def __init__(self, old: Device, new: Device, calibration: Calibration | None) -> None:
        self._old, self._new = old, new
        clock = Calibration.for_device(old).timer(old), (calibration or Calibration.for_device(new)).timer(new)
        self._timers = clock
        self._known: dict[tuple[str, tuple[Any, ...]], float | None] = {}

    def of(self, op: RecordedOp) -> How:
        """(factor, way)."""
        if _OVER_THE_HOST.match(op.name):
            return 1.0, AS_IT_WAS
        shaped = self._by_shape(op.operator) if op.operator is not None else None
        if shaped is not None:
            return shaped, BY_SHAPE
        if op.category in _PRODUCTS:
            dtype = next((name for name, text in _PRECISIONS if re.search(text, op.name, re.IGNORECASE)), "bf16")
            old, new = self._old.peak(dtype) or self._old.peak("fp32"), self._new.peak(dtype) or self._new.peak("fp32")
            return old / new, BY_FLOP
        return self._old.memory_bytes_per_s / self._new.memory_bytes_per_s, BY_BYTES

    def _by_shape(self, operator: tuple[str, tuple[Any, ...]]) -> float | None:
        if operator not in self._known:
            self._known[operator] = self._ratio(operator_kernels(*operator))
        return self._known[operator]

    def _ratio(self, kernels: tuple[Kernel, ...]) -> float | None:
        try:
            old_s, new_s = (sum(map(timer.kernel_s, kernels)) for timer in self._timers)
        except ShardwiseError:  # a precision that one of the devices has no curve for
            return None
        return new_s / old_s if old_s > 0 and new_s > 0 else None


def operator_kernels(name: str, arguments: tuple[Any, ...]) -> tuple[Kernel, ...]:
    """Kernels of an operator that a profiler recorded with its arguments; none where its shapes do not say them.

    A profiler does not record results: of what is not a product, the largest argument stands for it.
    """
    space, _, base = name.partition("::")
    found = [one for one in arguments if isinstance(one, CapturedTensor)]
    listed = [t for one in arguments if isinstance(one, tuple) for t in one if isinstance(t, CapturedTensor)]
    if space != "aten" or not (found or listed):
        return ()
    if base in _FLASH:
        at = 0 if base.endswith("forward") else 1
        heads_first = [_heads_first(one) if at <= i < at + 3 else one for i, one in enumerate(arguments)]
        base, arguments = f"_scaled_dot_product_flash_attention{'' if at == 0 else '_backward'}", tuple(heads_first)
    result = max(found or listed, key=lambda one: one.numel)
    try:
        one = priced(f"aten.{base}.default", (arguments, ()), (CapturedTensor(result.dtype, result.shape),))
    except (AttributeError, IndexError, TypeError, ValueError, ZeroDivisionError):  # not what its rule expects
        return ()
    return one.kernels if one.known else ()


def _heads_first(one: Any) -> Any:  # noqa: ANN401
    if not isinstance(one, CapturedTensor) or len(one.shape) != 4:
        return one
    b, s, h, d = one.shape
    return CapturedTensor(one.dtype, (b, h, s, d))


# -- collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What collectives run on. world: ranks of the job: all of the cluster's GPUs, or of one node some."""

    cluster: Cluster
    world: int
    curves: LinkCurves

    def seconds(self, kind: str, size_bytes: int, role: str) -> float:
        """Of one collective alone. Raises ShardwiseError where no model knows it."""
        shape = self.shape(role)
        return float(choose(kind, size_bytes, shape, self.cluster, self.curves).time_s)

    def shape(self, role: str) -> GroupShape:
        """How the groups of a lattice role lie on the nodes; a job smaller than a node leaves its other GPUs idle."""
        devices = self.cluster.num_devices
        found = Mesh(Plan(dp_replicate=devices, zero=0), self.cluster).group_shape(role)
        if self.world == devices:
            return found
        return replace(found, num_groups_per_node=max(1, min(found.num_groups_per_node, self.world // found.num_ranks)))


def sized(cluster: Cluster, world: int, place: str) -> Cluster:
    """The cluster with as many nodes as a job's ranks fill, or one of which they fill a part. Raises InputError."""
    nodes, rest = divmod(world, cluster.gpus_per_node)
    if rest and nodes:
        problem = f"has {cluster.gpus_per_node} GPUs a node, which {world} ranks do not fill"
        raise InputError.at(f"{place} {cluster.name}", problem, "a cluster that they fill")
    if cluster.num_nodes == max(1, nodes):
        return cluster
    return Cluster.parse({**cluster.model_dump(mode="json"), "num_nodes": max(1, nodes)}, place, InputError)


def collective_ratio(
    op: RecordedOp, old: Fabric, new: Fabric, resized: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> How:
    """(factor, method) of a collective whose group becomes `resized`."""
    carried = op.carried
    assert carried is not None
    if carried.size_bytes is None or not carried.size_bytes or len(carried.ranks) < 2:
        return 1.0, AS_IT_WAS
    try:
        before = old.seconds(carried.kind, carried.size_bytes, f"@{lattice(carried.ranks)}")
        after = new.seconds(carried.kind, carried.size_bytes, f"@{lattice(resized(carried.ranks))}")
    except ShardwiseError:
        return 1.0, AS_IT_WAS
    return (after / before if before > 0 else 1.0), BY_FABRIC


def with_collective_times(one: Recording, cluster: Cluster, curves: LinkCurves) -> Recording:
    """A recording whose collectives have no times, as an execution trace may be, with those that the collective model gives.

    All ops then begin as early as their waits allow. Raises InputError with every collective that it cannot price.
    """
    world = one.world_size or 1 + max((max(op.carried.ranks, default=0) for op in one.ops if op.carried), default=0)
    fabric = Fabric(cluster=sized(cluster, world, "--recorded-on"), world=world, curves=curves)
    ops, faults = list[RecordedOp](), dict[str, Fault]()
    for op in one.ops:
        if op.carried is None or op.duration_s:
            ops.append(op)
            continue
        size, ranks = op.carried.size_bytes, op.carried.ranks
        place = f"{one.name}: {op.carried.kind} of group {op.carried.group or '?'}"
        try:
            if size is None or len(ranks) < 2:
                remedy = "comm_size, and comm_groups.json beside the trace"
                raise InputError.at(place, "its size or its ranks are not told", remedy)
            seconds = fabric.seconds(op.carried.kind, size, f"@{lattice(ranks)}")
        except (ShardwiseError, ValueError) as exc:
            found = exc.faults[0] if isinstance(exc, InputError) else Fault(place=place, problem=str(exc))
            faults.setdefault(place, found)
            continue
        ops.append(replace(op, end_s=op.start_s + seconds))
    if faults:
        raise InputError(list(faults.values())[:20])
    ops = scheduled(ops)
    return replace(one, ops=ops, step_s=max(op.end_s for op in ops))


def volume_ratio(kind: str, before: int, after: int) -> How:
    """(factor, method) without a known fabric: a ring's volume per rank, (n - 1)/n of the tensor, twice for an all-reduce."""
    if kind not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") or before < 2:
        return 1.0, AS_IT_WAS
    return ((after - 1) / after) / ((before - 1) / before), BY_VOLUME
