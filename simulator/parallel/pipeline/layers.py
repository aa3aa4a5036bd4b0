"""Which layers each chunk of each stage holds."""

from __future__ import annotations

from collections.abc import Iterator

from simulator.base.errors import Fault, PlanError
from simulator.parallel.pipeline.placement import num_positions, position
from simulator.spec.plan.schedules import EQUAL, Schedule, Split


def stage_layers(
    num_layers: int, num_stages: int, num_chunks: int = 1, *, split: Split = EQUAL, schedule: Schedule = "1f1b"
) -> tuple[tuple[range, ...], ...]:
    """The layers of each chunk of each stage: `[stage][chunk]` is a range of layer numbers.

    Raises PlanError where the layers cannot be dealt so.
    """
    if found := layer_faults(schedule, num_layers, num_stages, num_chunks, split):
        raise PlanError(found)
    ranges: list[range] = []
    for count in _counts(schedule, num_layers, num_stages, num_chunks, split):
        begin = ranges[-1].stop if ranges else 0
        ranges.append(range(begin, begin + count))
    return tuple(
        tuple(ranges[position(schedule, num_stages, stage, chunk)] for chunk in range(num_chunks))
        for stage in range(num_stages)
    )


def _counts(schedule: Schedule, num_layers: int, num_stages: int, num_chunks: int, split: Split) -> tuple[int, ...]:
    """Layers of each position. The split is legal."""
    if split.explicit is not None:
        return split.explicit
    positions = num_positions(schedule, num_stages, num_chunks)
    if split.first is not None or split.last is not None:
        way = positions // num_stages  # chunks of a stage that one micro-batch passes
        chunk_counts = [count // way for count in _stage_counts(num_layers, num_stages, split)]
        if schedule == "dualpipe_v":
            return (*chunk_counts, *reversed(chunk_counts))
        return tuple(chunk_counts) * way
    share, rest = divmod(num_layers + split.ends_as_layers, positions)
    counts = [share + (place < rest) for place in range(positions)]
    counts[0] -= split.embedding_as_layer
    counts[-1] -= split.head_as_layer
    return tuple(counts)


def _stage_counts(num_layers: int, num_stages: int, split: Split) -> list[int]:
    """Layers of each stage where the ends are given; what does not divide is left over (a fault)."""
    given = [count for count in (split.first, split.last) if count is not None]
    middle = num_stages - len(given)
    share = (num_layers - sum(given)) // middle if middle else 0
    counts = [share] * num_stages
    if split.first is not None:
        counts[0] = split.first
    if split.last is not None:
        counts[-1] = split.last
    return counts


def layer_faults(
    schedule: Schedule, num_layers: int, num_stages: int, num_chunks: int, split: Split = EQUAL, place: str = "plan"
) -> list[Fault]:
    """Every reason why the layers cannot be divided like this."""
    counts = {"layers": num_layers, "pp": num_stages, "virtual_stages": num_chunks}
    if low := [name for name, count in counts.items() if count < 1]:
        return [Fault(place=f"{place}: {name}", problem=f"{name} = {counts[name]}", remedy="1 or more") for name in low]
    positions = num_positions(schedule, num_stages, num_chunks)
    if split.explicit is not None:
        return list(_explicit_faults(num_layers, positions, split, place))
    if split.first is not None or split.last is not None:
        return list(_ends_faults(num_layers, num_stages, positions // num_stages, split, place))
    return list(_equal_faults(num_layers, num_stages, positions, split, place))


def _explicit_faults(num_layers: int, positions: int, split: Split, place: str) -> Iterator[Fault]:
    counts = split.explicit or ()
    where = f"{place}: stage_layers"
    others = split.first is not None or split.last is not None or split.ends_as_layers
    if others:
        problem = "layers of each stage are given, and first, last, embedding or head as layers too"
        yield Fault(place=where, problem=problem, remedy="one of the two")
    if len(counts) != positions:
        remedy = f"{positions} numbers: pp × virtual_stages"
        yield Fault(place=where, problem=f"{len(counts)} numbers for {positions} virtual stages", remedy=remedy)
    if any(count < 0 for count in counts):
        yield Fault(place=where, problem=f"{min(counts)} layers in a stage", remedy="0 or more")
    if sum(counts) != num_layers:
        summed = " + ".join(map(str, counts)) if len(counts) <= 16 else "the numbers sum to"
        problem = f"{summed} = {sum(counts)}, the model has {num_layers} layers"
        yield Fault(place=where, problem=problem, remedy=f"numbers that sum to {num_layers}")


def _ends_faults(num_layers: int, num_stages: int, way: int, split: Split, place: str) -> Iterator[Fault]:
    given = {"first": split.first, "last": split.last}
    sizes = {name: count for name, count in given.items() if count is not None}
    if split.ends_as_layers:
        problem = "layers of the first or last stage are given, and embedding or head count as layers too"
        yield Fault(place=f"{place}: first_stage_layers", problem=problem, remedy="one of the two")
    for name, count in sizes.items():
        where = f"{place}: {name}_stage_layers"
        if count < 1:
            yield Fault(place=where, problem=f"{count} layers", remedy="1 or more")
        elif count % way:
            problem = f"{count} layers are not a multiple of virtual_stages = {way}"
            yield Fault(place=where, problem=problem, remedy=_nearest(count, way))
    middle, left = num_stages - len(sizes), num_layers - sum(sizes.values())
    where = f"{place}: pp"
    equation = f"{num_layers} layers - {' - '.join(map(str, sizes.values()))} = {left}"
    if middle < 0:
        yield Fault(place=where, problem=f"first and last of pp = {num_stages} stages", remedy="pp = 2 or more")
    elif middle == 0 and left:
        yield Fault(place=where, problem=f"{equation} left, and no stage for them", remedy=f"sum to {num_layers}")
    elif middle and (left < middle * way or left % (middle * way)):
        problem = f"{equation} left for {middle} stages of {way} chunks"
        remedy = f"leave {_nearest(left, middle * way)}"
        yield Fault(place=where, problem=problem, remedy=remedy)


def _equal_faults(num_layers: int, num_stages: int, positions: int, split: Split, place: str) -> Iterator[Fault]:
    total, ends, way = num_layers + split.ends_as_layers, split.ends_as_layers, positions // num_stages
    counted = f"{num_layers} layers" + (f" + {ends} (embedding, head)" if ends else "")
    chunks = f"pp = {num_stages}" + (f" × {way} virtual stages = {positions}" if way > 1 else "")
    if total < positions:
        problem = f"{chunks} for {counted}"
        yield Fault(place=f"{place}: pp", problem=problem, remedy=f"pp × virtual_stages ≤ {total}")
    elif split.even and total % positions:
        remedy = f"pp × virtual_stages = {_nearest_divisors(total, positions)}"
        problem = (
            f"{counted} = {total} is not a multiple of {chunks}" if ends else f"{counted} do not divide by {chunks}"
        )
        yield Fault(place=f"{place}: pp", problem=problem, remedy=remedy)


def _nearest(count: int, unit: int) -> str:
    """The multiples of `unit` next to `count`, as the user would write them."""
    below = count // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def _nearest_divisors(total: int, near: int) -> str:
    below = next(size for size in range(near, 0, -1) if total % size == 0)
    above = next((size for size in range(near + 1, total + 1) if total % size == 0), None)
    return f"{below} or {above}" if above else f"{below}"
