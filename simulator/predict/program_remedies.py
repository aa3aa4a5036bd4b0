"""Remedies of a captured program: changes for which its capture can be rewritten, each predicted in full.

A program's model and plan are its own, so what can be changed from outside is little: the allocator's settings, checkpoints
around its repeated modules, what they save or the optimizer kept in host memory, and larger GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

from simulator.base.errors import InputError
from simulator.base.fit import Fit
from simulator.base.units import format_bytes
from simulator.memory.use import MemoryUse
from simulator.predict.changes import EXPANDABLE
from simulator.predict.play import SimulatedStep
from simulator.predict.prediction import Prediction, Remedy
from simulator.predict.verdict import fitting
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.cluster import cluster_names
from simulator.work.captured.capture import Capture
from simulator.work.captured.changed import Forward, checkpointed, forwards, offloaded, offloaded_bytes
from simulator.work.captured.script import CapturedScript
from simulator.work.captured.updated import optimizer_in_host, update_of

NUM_REMEDIES = 3
_CUDA = ("volta", "turing", "ampere", "ada", "hopper", "blackwell")  # of the kernels that were captured
_NOTHING = (
    "no change that was tried makes it fit: smaller batches or more ranks to shard over, which the program decides: change it "
    "and capture it again"
)
_Answer = tuple[float, MemoryUse] | None  # seconds of a step, memory; None: it does not surely fit
Predict = Callable[..., _Answer]
_Tried = tuple[str, str, Callable[[], _Answer]]  # in words, the variable to set, what predicts it


def advised(
    found: Prediction,
    capture: Capture,
    cluster: Cluster,
    calibration: Calibration | None,
    curves: LinkCurves | None,
    predict: Predict,
    scripts: Mapping[int, CapturedScript],
    played: SimulatedStep,
) -> Prediction:
    """The prediction with up to three changes under which the program surely fits, the cheapest first; as it is if it does.

    scripts, played: of the capture as it is; without what its memory costs.
    """
    if found.verdict is Fit.FITS:
        return found
    here = partial(predict, cluster=cluster, calibration=calibration, curves=curves)
    elsewhere = partial(predict, capture, scripts=scripts)
    larger = _fitting(_larger_gpus(found, capture, cluster, elsewhere), found)
    remedies = [*_fitting(_of_the_program(capture, cluster, here, scripts, played), found), *islice(larger, 1)]
    remedies.sort(key=lambda remedy: remedy.cost)
    text = fitting(remedies[:NUM_REMEDIES], found.num_devices) if remedies else _NOTHING
    return replace(found, remedies=tuple(remedies[:NUM_REMEDIES]), suggestion=text)


def _of_the_program(
    capture: Capture,
    cluster: Cluster,
    predict: Predict,
    scripts: Mapping[int, CapturedScript],
    played: SimulatedStep,
) -> Iterator[_Tried]:
    """The allocator's settings, checkpoints, activations or the optimizer in host memory."""
    yield EXPANDABLE, EXPANDABLE, partial(predict, capture, expandable_segments=True, scripts=scripts, played=played)
    known = dict[int, list[Forward]]()

    def found(one: Capture) -> list[Forward]:
        if one.rank not in known:
            known[one.rank] = forwards(one)
        return known[one.rank]

    for every, which in ((2, "every second one"), (1, "each")) if found(capture) else ():
        change = f"checkpoint {which} of its repeated modules (torch.utils.checkpoint)"
        yield change, "", partial(predict, capture, change=lambda one, n=every: checkpointed(one, n, found(one)))
    tier = cluster.host_tier
    if tier is None:
        return
    ranks = min(cluster.gpus_per_node, capture.world_size)
    down, up = (min(rate, tier.memory_bytes_per_s / ranks) for rate in (tier.d2h_bytes_per_s, tier.h2d_bytes_per_s))
    if (size := offloaded_bytes(found(capture))) and ranks * size <= tier.memory_bytes:
        change = f"keep what its repeated modules save in host memory ({format_bytes(size)} a rank)"
        yield change, "", partial(predict, capture, change=lambda one: offloaded(one, down, up, found(one)))
    update = update_of(capture)
    if update and ranks * sum(update[1:]) <= tier.memory_bytes:
        change = f"keep the optimizer and its state in host memory ({format_bytes(sum(update[1:]))} a rank)"
        yield change, "", partial(predict, capture, change=lambda one: optimizer_in_host(one, tier, ranks))


def _larger_gpus(found: Prediction, capture: Capture, cluster: Cluster, predict: Predict) -> Iterator[_Tried]:
    """The same number of GPUs with more memory: sufficient presets, least first, of equal ones those of the same family."""
    needed = found.memory.high_reserved_bytes + found.memory.outside_torch_bytes
    larger = [
        one
        for one in map(Cluster.load, cluster_names())
        if one.device.memory_bytes > max(needed, cluster.device.memory_bytes)
        and one.device.architecture in _CUDA
        and capture.world_size % one.gpus_per_node == 0
    ]
    family = cluster.name.partition("-")[0]
    for one in sorted(larger, key=lambda one: (one.device.memory_bytes, not one.name.startswith(family), one.name)):
        yield f"--cluster {one.name}", "", partial(predict, one.with_nodes(capture.world_size // one.gpus_per_node))


def _fitting(changes: Iterable[_Tried], found: Prediction) -> Iterator[Remedy]:
    """The changes under which the program surely fits."""
    for change, environment, predict in changes:
        try:
            one = predict()
        except InputError:
            continue
        if one is not None:
            yield _remedy(change, environment, *one, found)


def _remedy(change: str, environment: str, step_s: float, memory: MemoryUse, found: Prediction) -> Remedy:
    """A change with its step's seconds and its memory, beside the program as it is."""
    return Remedy(
        change=change,
        plan={},
        environment=environment,
        num_devices=found.num_devices,
        tokens_per_step=found.tokens_per_step,
        step_s=step_s,
        cost=step_s / found.step_s,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        used_bytes=memory.used_bytes,
        changes_numerics=False,
    )
