"""Answers about tensors as text and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from simulator.base.units import counted, format_bytes, format_seconds
from simulator.studies.tensors.assign import Assignment, Node, Transfer
from simulator.work.offload.tiered import Tensor, Tiered

_SHOWN: Final = 12


def placed_data(
    tensors: Sequence[Tensor], node: Node, found: Assignment, transfers: Sequence[Transfer]
) -> dict[str, Any]:
    """An assignment and its transfers."""
    return {
        "schema_version": 1,
        "fits": not found.too_much,
        "too_much_bytes": {str(gpu): size for gpu, size in found.too_much.items()},
        "room_bytes": list(node.room),
        "road_s": found.road_s,
        "least_s": found.least_s,
        "exact": found.exact,
        "exposed_s": sum(one.exposed_s for one in transfers),
        "tensors": [
            {
                "name": one.name,
                "gpu": one.gpu,
                "holder": gpu,
                "bytes": one.num_bytes,
                "from_s": one.first_s,
                "to_s": one.last_s,
            }
            for one, gpu in zip(tensors, found.holders, strict=True)
        ],
        "transfers": [{**asdict(one), "exposed_s": one.exposed_s} for one in transfers],
    }


def placed_text(
    tensors: Sequence[Tensor], node: Node, found: Assignment, transfers: Sequence[Transfer]
) -> Iterator[str]:
    """The same for people."""
    away = [(one, gpu) for one, gpu in zip(tensors, found.holders, strict=True) if gpu != one.gpu]
    verdict = "DOES NOT FIT" if found.too_much else "FITS"
    yield f"{verdict}  {counted(len(tensors), 'tensor')} on {counted(len(node.room), 'GPU')}, {len(away)} of them held by a peer"
    for gpu, size in found.too_much.items():
        yield f"      GPU {gpu}: {format_bytes(size)} find no place"
    how = "none takes less" if found.exact else f"at least {format_seconds(found.least_s)} by the lower bound"
    yield f"roads: {format_seconds(found.road_s)} of transfers a step ({how})"
    exposed = sum(move.exposed_s for move in transfers)
    ahead = sum(move.how == "copied ahead" for move in transfers)
    yield f"uses: {len(transfers)} over roads, {ahead} of them copied ahead; {format_seconds(exposed)} come late"
    by_pair = Counter[tuple[int, int]]()
    for one, gpu in away:
        by_pair[gpu, one.gpu] += one.num_bytes
    for (holder, gpu), size in sorted(by_pair.items()):
        yield f"  GPU {holder} holds {format_bytes(size)} of GPU {gpu}"
    for move in transfers[:_SHOWN]:
        times = f"{format_seconds(move.start_s)} to {format_seconds(move.end_s)}, used at {format_seconds(move.used_s)}"
        yield f"  {move.tensor}: GPU {move.source} to {move.target}, {format_bytes(move.num_bytes)}, {move.how}, {times}"
    if len(transfers) > _SHOWN:
        yield f"  and {len(transfers) - _SHOWN} more (--json has all)"


def tiered_data(found: Tiered) -> dict[str, Any]:
    """A step on tiers."""
    return {"schema_version": 1, "fits": not found.over_bytes, **asdict(found)}


def tiered_text(found: Tiered) -> Iterator[str]:
    """The same for people."""
    yield f"{'DOES NOT FIT' if found.over_bytes else 'FITS'}  {counted(found.num_uses, 'use')}, {found.misses} of what is not in HBM"
    if found.over_bytes:
        yield f"      {format_bytes(found.over_bytes)} find no place"
    yield f"waits: {format_seconds(found.waits_s)} a step, {format_seconds(found.hidden_s)} beside computation; {found.faults:,} moves"
    for name, peak in found.peak_bytes.items():
        moved = f"{format_bytes(found.fetched.get(name, 0))} fetched from it, {format_bytes(found.evicted.get(name, 0))} evicted to it"
        yield f"  {name}: at most {format_bytes(peak)}" + ("" if name == "hbm" else f", {moved}")
    for when_s, tensor, source, target in found.changes[:_SHOWN]:
        yield f"  {format_seconds(when_s)}: {tensor}, {source} to {target}"
    if len(found.changes) > _SHOWN:
        yield f"  and {len(found.changes) - _SHOWN} more (--json has all)"
