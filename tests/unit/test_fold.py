from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simulator.play.engine import run
from simulator.play.fold import refine_partitions
from simulator.work.program import Program, ProgramOp
from tests.folding import fold_programs, refine
from tests.strategies import compute, gather, program


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Labels of up to 24 ranks, and for each axis the group that each of them is in."""
    num_ranks = draw(st.integers(1, 24))
    each = st.lists(st.integers(0, 3), min_size=num_ranks, max_size=num_ranks)
    return draw(each), draw(st.lists(each, max_size=3))


@given(meshes())
def test_the_classes_of_a_mesh_are_those_of_the_oracle(mesh: tuple[list[int], list[list[int]]]) -> None:
    labels, axes = mesh
    groups = [
        (axis, [rank for rank, own in enumerate(group_of) if own == group])
        for axis, group_of in enumerate(axes)
        for group in sorted(set(group_of))
    ]
    colours = refine_partitions(labels, [np.array(group_of, dtype=np.int64) for group_of in axes]).tolist()
    classes = {tuple(rank for rank, other in enumerate(colours) if other == colour) for colour in colours}
    assert classes == set(refine(labels, groups))


def _ring(num_ranks: int) -> list[tuple[str, tuple[int, ...]]]:
    return [("shift", (rank, (rank + 1) % num_ranks)) for rank in range(num_ranks)]


def test_equal_ranks_are_one_class() -> None:
    assert refine(["gpu"] * 6, [("node", (0, 1, 2)), ("node", (3, 4, 5))]) == [(0, 1, 2, 3, 4, 5)]


def test_labels_of_ranks_and_groups_tell_apart() -> None:
    assert refine(["a", "b", "a"], []) == [(0, 2), (1,)]
    assert refine(["gpu"] * 4, [("fast", (0, 1)), ("slow", (2, 3))]) == [(0, 1), (2, 3)]


def test_group_sizes_tell_apart() -> None:
    assert refine(["gpu"] * 5, [("node", (0, 1, 2)), ("node", (3, 4))]) == [(0, 1, 2), (3, 4)]


def test_a_straggler_marks_those_who_wait_for_it_and_those_who_wait_for_them() -> None:
    # 2 x 3 mesh, rows and columns meet; rank 0 is slow: itself, its row, its column, the rest.
    rows, columns = [(0, 1, 2), (3, 4, 5)], [(0, 3), (1, 4), (2, 5)]
    groups = [("row", row) for row in rows] + [("column", column) for column in columns]
    assert refine([1, 0, 0, 0, 0, 0], groups) == [(0,), (1, 2), (3,), (4, 5)]


def test_a_bill_does_not_remember_distance_but_a_ring_does() -> None:
    slow = [1, 0, 0, 0, 0, 0]
    assert refine(slow, [("all", tuple(range(6)))]) == [(0,), (1, 2, 3, 4, 5)]
    assert refine(slow, _ring(6)) == [(0,), (1, 5), (2, 4), (3,)]


def test_the_order_of_members_and_groups_does_not_matter() -> None:
    groups = [("row", (0, 1)), ("row", (2, 3)), ("column", (0, 2)), ("column", (1, 3))]
    reordered = [(label, members[::-1]) for label, members in groups[::-1]]
    assert refine([0, 0, 0, 1], groups) == refine([0, 0, 0, 1], reordered)


def _node_rank(rank: int, ops: list[ProgramOp]) -> Program:
    return program(*ops, name=f"rank {rank}", **{f"port_{rank}": Fraction(4), "nic": Fraction(6)})


def test_bytes_of_all_ranks_on_a_shared_nic_are_kept() -> None:
    # Three ranks send 2 bytes each over one NIC of 6 bytes/s: 1 s, not the third of it that one rank alone would take.
    programs = [_node_rank(rank, [gather(0, {f"port_{rank}": 1, "nic": 2})]) for rank in range(3)]
    (folded,) = fold_programs(programs)
    assert folded.num_ranks == 3
    assert run([folded]).step_s == run(programs).step_s == 1


def test_a_group_among_equal_ranks_has_one_member() -> None:
    programs = [_node_rank(rank, [gather(0, {f"port_{rank}": 8}, key="all", members=4)]) for rank in range(4)]
    (folded,) = fold_programs(programs)
    assert [op.members for op in folded.ops if not hasattr(op, "duration_s")] == [1]
    assert run([folded]).step_s == 2


def test_a_straggler_keeps_a_class_and_a_seat_in_the_group() -> None:
    programs = [
        _node_rank(
            rank, [compute(0, Fraction(3 if rank == 2 else 1)), gather(1, {f"port_{rank}": 8}, 0, key="all", members=4)]
        )
        for rank in range(4)
    ]
    folded = fold_programs(programs)
    assert [(each.name, each.num_ranks) for each in folded] == [("rank 0", 3), ("rank 2", 1)]
    assert run(folded).step_s == run(programs).step_s == 3 + 2


def test_neighbours_in_a_ring_of_equals_meet_themselves() -> None:
    # Each rank's send meets the next rank's receive; folded, the one class meets its own receive: two members still.
    programs = [
        _node_rank(
            rank,
            [
                gather(0, {f"port_{rank}": 8}, stream="send", key=f"from {rank}", members=2),
                gather(1, {}, stream="receive", key=f"from {(rank - 1) % 5}", members=2),
            ],
        )
        for rank in range(5)
    ]
    (folded,) = fold_programs(programs)
    assert run([folded]).step_s == run(programs).step_s == 2


def test_a_slow_link_splits_classes() -> None:
    programs = [
        program(gather(0, {f"l{rank}": 6}), name=f"rank {rank}", **{f"l{rank}": 2 if rank == 1 else 3})
        for rank in range(3)
    ]
    folded = fold_programs(programs)
    assert [each.num_ranks for each in folded] == [2, 1]
    assert run(folded).step_s == 3
