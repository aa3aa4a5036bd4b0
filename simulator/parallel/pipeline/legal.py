"""Which combinations a schedule runs, as faults with the equation and the nearest legal values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from simulator.base.errors import Fault
from simulator.parallel.pipeline.layers import layer_faults
from simulator.spec.plan.schedules import EQUAL, Schedule, Split


def faults(
    schedule: Schedule,
    num_layers: int,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    *,
    group_size: int | None = None,
    split: Split = EQUAL,
    place: str = "plan",
) -> list[Fault]:
    """Every reason why the pipeline cannot run: the schedule's requirements, and the division of layers."""
    counts = num_layers, num_stages, num_micro_batches, num_chunks
    return list(_faults(schedule, *counts, group_size, split, place))


@lru_cache(maxsize=4096)  # a search asks about the same few pipelines thousands of times
def _faults(
    schedule: Schedule,
    num_layers: int,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int,
    group_size: int | None,
    split: Split,
    place: str,
) -> tuple[Fault, ...]:
    found = schedule_faults(schedule, num_stages, num_micro_batches, num_chunks, group_size, place)
    layers = layer_faults(schedule, num_layers, num_stages, num_chunks, split, place)
    return (*found, *(fault for fault in layers if fault not in found))


def schedule_faults(
    schedule: Schedule,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    place: str = "plan",
) -> list[Fault]:
    """Violations of the schedule's requirements on stages, micro-batches and chunks. Empty: it can run."""
    counts = {"pp": num_stages, "num_micro_batches": num_micro_batches, "virtual_stages": num_chunks}
    found = [
        Fault(place=f"{place}: {name}", problem=f"{name} = {count}", remedy="1 or more")
        for name, count in counts.items()
        if count < 1
    ]
    if found:
        return found
    found += _chunk_faults(schedule, num_chunks, place)
    if schedule == "interleaved":
        found += _interleaved_faults(num_stages, num_micro_batches, group_size, place)
    elif group_size is not None:
        problem = f"{schedule} has no groups of micro-batches"
        found.append(Fault(place=f"{place}: micro_batch_group", problem=problem, remedy='schedule = "interleaved"'))
    if schedule in ("dualpipe", "dualpipe_v"):
        found += _dualpipe_faults(schedule, num_stages, num_micro_batches, place)
    return found


def _chunk_faults(schedule: Schedule, num_chunks: int, place: str) -> Iterator[Fault]:
    where = f"{place}: virtual_stages"
    if schedule in ("1f1b", "zb_h1") and num_chunks > 1:
        problem = f"{schedule} has one chunk a stage, virtual_stages = {num_chunks}"
        yield Fault(place=where, problem=problem, remedy='virtual_stages = 1, or schedule = "interleaved"')
    elif schedule == "interleaved" and num_chunks < 2:
        problem = "interleaving needs chunks to interleave, virtual_stages = 1"
        yield Fault(place=where, problem=problem, remedy='virtual_stages = 2 or more, or schedule = "1f1b"')
    elif schedule in ("dualpipe", "dualpipe_v") and num_chunks != 2:
        problem = f"{schedule} has two chunks a stage, virtual_stages = {num_chunks}"
        yield Fault(place=where, problem=problem, remedy="virtual_stages = 2")


def _interleaved_faults(p: int, m: int, group_size: int | None, place: str) -> Iterator[Fault]:
    """Megatron-LM's demands (`schedules.py`, `forward_backward_pipelining_with_interleaving`; `arguments.py`)."""
    if p < 2:
        yield Fault(place=f"{place}: pp", problem="interleaving needs stages, pp = 1", remedy="pp = 2 or more")
    if group_size is None:
        if m % p:
            problem = f"micro-batches go in groups of pp: num_micro_batches = {m} is not a multiple of pp = {p}"
            nearest = f"{m // p * p} or {m // p * p + p}" if m > p else f"{p}"
            yield Fault(place=f"{place}: num_micro_batches", problem=problem, remedy=f"num_micro_batches = {nearest}")
        return
    where = f"{place}: micro_batch_group"
    if not p <= group_size <= m:
        problem = f"pp ≤ group ≤ num_micro_batches: {p} ≤ {group_size} ≤ {m} is wrong"
        remedy = f"{p if group_size < p else m}" if p <= m else f"num_micro_batches = {p} or more"
        yield Fault(place=where, problem=problem, remedy=remedy)
    elif 0 < m % group_size < p:
        rest, whole = m % group_size, m - m % group_size
        problem = f"num_micro_batches = {m} leaves {rest} after groups of {group_size}: neither 0 nor ≥ pp = {p}"
        remedy = f"num_micro_batches = {whole} or {whole + p}"
        yield Fault(place=f"{place}: num_micro_batches", problem=problem, remedy=remedy)


def _dualpipe_faults(schedule: Schedule, p: int, m: int, place: str) -> Iterator[Fault]:
    """What `dualpipe.py` and `dualpipev.py` of deepseek-ai/DualPipe assert."""
    where = f"{place}: num_micro_batches"
    if schedule == "dualpipe" and p % 2:
        remedy = f"pp = {p - 1} or {p + 1}" if p > 1 else "pp = 2"
        yield Fault(place=f"{place}: pp", problem=f"DualPipe mirrors stages in pairs, pp = {p} is odd", remedy=remedy)
    if schedule == "dualpipe" and m % 2:
        nearest = sorted({max(m - 1, 2 * p), max(m + 1, 2 * p)})
        problem = f"half of the micro-batches go each way, num_micro_batches = {m} is odd"
        yield Fault(place=where, problem=problem, remedy=f"num_micro_batches = {' or '.join(map(str, nearest))}")
    if m < 2 * p:
        problem = f"{schedule} needs num_micro_batches ≥ 2 × pp: {m} < {2 * p}"
        yield Fault(place=where, problem=problem, remedy=f"num_micro_batches = {2 * p}")
