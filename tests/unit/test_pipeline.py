"""Pipeline orders, stage contents and what is refused, on examples that their sources print."""

from __future__ import annotations

import pytest

from simulator.base.errors import PlanError
from simulator.parallel.legality import check
from simulator.parallel.legality.rule import Pipeline
from simulator.parallel.pipeline import (
    Action,
    Schedule,
    Split,
    neighbours,
    order,
    position,
    stage_layers,
)
from simulator.spec.plan import Plan
from tests.pipelines import pipeline_faults


def text(schedule: Schedule, p: int, m: int, stage: int, v: int = 1) -> str:
    return " ".join(map(str, order(schedule, p, m, stage, v)))


def kinds(schedule: Schedule, p: int, m: int, stage: int, v: int = 1) -> str:
    return "".join(action.kind for action in order(schedule, p, m, stage, v))


# -- orders --------------------------------------------------------------------------------------------------------


def test_1f1b_warms_up_with_one_forward_less_a_stage() -> None:
    assert [kinds("1f1b", 4, 6, stage).index("B") for stage in range(4)] == [4, 3, 2, 1]
    assert text("1f1b", 2, 3, 0) == "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0"


def test_interleaving_follows_the_table_in_megatrons_comment() -> None:
    # schedules.py, get_schedule_table: groups of pp micro-batches go through a chunk, then through the next
    forwards = [a for a in order("interleaved", 2, 4, 1, 2) if a.kind == "F"]
    assert [a.micro_batch for a in forwards] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [a.chunk for a in forwards] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_interleaving_warms_up_as_megatron_counts() -> None:
    # get_pp_rank_microbatches: 2 (p - s - 1) + (v - 1) g, at most all
    for stage in range(4):
        assert kinds("interleaved", 4, 8, stage, 2).index("B") == 2 * (3 - stage) + 4 + 1
    assert kinds("interleaved", 4, 4, 0, 2) == "F" * 8 + "B" * 8


def test_zb_h1_delays_weights_by_the_stage() -> None:
    # Qi et al., arXiv 2401.10241, section 2.1: 1F1B, but W start later by the warm-up that a stage lacks
    assert kinds("zb_h1", 4, 8, 3).startswith("FBFBFBFBWFBWFBW")
    assert kinds("zb_h1", 4, 8, 0).startswith("FFFFBWFBWFBW")


def test_dualpipe_is_the_papers_figure() -> None:
    # Figure 5 (8 ranks, 20 micro-batches), first rank: seven forwards, the other direction's first, three times B W F,
    # then pairs; at the end B W in turn
    first = order("dualpipe", 8, 20, 0, 2)
    assert " ".join(map(str, first[:17])) == (
        "F0.0 F1.0 F2.0 F3.0 F4.0 F5.0 F6.0 F10.1 B10.1 W10.1 F11.1 B11.1 W11.1 F12.1 B12.1 W12.1 F13.1"
    )
    assert [(str(a), a.beside) for a in first[17:21]] == [
        ("F7.0", False),
        ("B13.1", True),
        ("F14.1", False),
        ("B0.0", True),
    ]
    assert " ".join(map(str, first[-8:])) == "B6.0 W6.0 B7.0 W7.0 B8.0 W8.0 B9.0 W9.0"


def test_dualpipe_is_its_own_mirror_image() -> None:
    for stage in range(4):
        mirrored = [
            Action(a.kind, (a.micro_batch + 10) % 20, 1 - a.chunk) for a in order("dualpipe", 8, 20, 7 - stage, 2)
        ]
        assert mirrored == list(order("dualpipe", 8, 20, stage, 2))


# -- neighbours ----------------------------------------------------------------------------------------------------


def test_the_last_stages_chunk_passes_on_to_the_first_stages_next() -> None:
    forward = neighbours("interleaved", 4, 3, Action("F", 5, 0), 2)
    assert forward.after == ((2, Action("F", 5, 0)),)
    assert forward.sends == (0, Action("F", 5, 1))
    backward = neighbours("interleaved", 4, 3, Action("B", 5, 1), 2)
    assert backward.after == ((3, Action("F", 5, 1)),)
    assert backward.receives is None


def test_the_bottom_of_the_v_sends_nothing() -> None:
    turn = neighbours("dualpipe_v", 4, 3, Action("F", 0, 1), 2)
    assert turn.after == ((3, Action("F", 0, 0)),)
    assert turn.receives is None
    assert turn.sends == (2, Action("F", 0, 1))


def test_dualpipe_sends_both_ways() -> None:
    assert neighbours("dualpipe", 4, 1, Action("F", 0, 0), 2).sends == (2, Action("F", 0, 0))
    assert neighbours("dualpipe", 4, 1, Action("F", 9, 1), 2).sends == (0, Action("F", 9, 1))
    assert [position("dualpipe", 4, 3, chunk) for chunk in (0, 1)] == [3, 0]


# -- layers --------------------------------------------------------------------------------------------------------


def numbers(layers: tuple[tuple[range, ...], ...]) -> list[list[list[int]]]:
    return [[list(chunk) for chunk in stage] for stage in layers]


def test_chunks_hold_what_megatrons_comment_says() -> None:
    # transformer_block.py, get_num_layers_to_build: 8 layers on 2 stages, in 4 and in 2 chunks
    assert numbers(stage_layers(8, 2, 4)) == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]
    assert numbers(stage_layers(8, 2, 2)) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_given_ends_are_shared_by_chunks() -> None:
    # get_transformer_layer_offset: first 2 and last 4 of 14 layers on 4 stages leave 4 to each in the middle
    assert numbers(stage_layers(14, 4, 2, split=Split(first=2, last=4))) == [
        [[0], [7]],
        [[1, 2], [8, 9]],
        [[3, 4], [10, 11]],
        [[5, 6], [12, 13]],
    ]
    assert [len(stage[0]) for stage in stage_layers(61, 4, split=Split(last=13))] == [16, 16, 16, 13]


def test_llama_405b_leaves_a_layers_room_for_embedding_and_head() -> None:
    # The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2: one layer less on the first and the last stage, of 126
    dealt = stage_layers(126, 16, 8, split=Split(embedding_as_layer=True, head_as_layer=True, even=True))
    sizes = [[len(chunk) for chunk in stage] for stage in dealt]
    assert sizes == [[0, *[1] * 7], *[[1] * 8] * 14, [*[1] * 7, 0]]


def test_layers_that_do_not_divide_go_to_the_first_stages() -> None:
    assert [len(stage[0]) for stage in stage_layers(10, 4)] == [3, 3, 2, 2]
    assert [len(stage[0]) for stage in stage_layers(10, 4, split=Split(explicit=(1, 4, 5, 0)))] == [1, 4, 5, 0]


def test_dualpipe_holds_every_layer_twice_and_dualpipe_v_once() -> None:
    both = stage_layers(8, 4, 2, schedule="dualpipe")
    assert numbers(both)[0] == [[0, 1], [6, 7]]
    assert numbers(both)[3] == [[6, 7], [0, 1]]
    assert numbers(stage_layers(8, 2, 2, schedule="dualpipe_v")) == [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]
    assert numbers(stage_layers(10, 2, 2, schedule="dualpipe_v", split=Split(first=4)))[0] == [[0, 1], [8, 9]]


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v", "place", "remedy"),
    [
        ("interleaved", 4, 10, 2, "num_micro_batches", "8 or 12"),
        ("interleaved", 4, 3, 2, "num_micro_batches", "4"),
        ("interleaved", 4, 8, 1, "virtual_stages", "1f1b"),
        ("interleaved", 1, 8, 2, "pp", "pp = 2"),
        ("1f1b", 4, 8, 2, "virtual_stages", "interleaved"),
        ("dualpipe", 3, 8, 2, "pp", "pp = 2 or 4"),
        ("dualpipe", 4, 9, 2, "num_micro_batches", "8 or 10"),
        ("dualpipe", 4, 6, 2, "num_micro_batches", "8"),
        ("dualpipe_v", 4, 9, 1, "virtual_stages", "2"),
        ("dualpipe_v", 4, 7, 2, "num_micro_batches", "8"),
        ("gpipe", 4, 0, 1, "num_micro_batches", "1 or more"),
    ],
)
def test_a_schedule_that_cannot_run_names_the_nearest_that_can(
    schedule: Schedule, p: int, m: int, v: int, place: str, remedy: str
) -> None:
    (fault,) = pipeline_faults(Pipeline(schedule, p, m, v, 64))
    assert fault.place == f"plan: {place}"
    assert remedy in fault.remedy
    with pytest.raises(PlanError):
        order(schedule, p, m, 0, v)


@pytest.mark.parametrize(
    ("layers", "p", "v", "split", "remedy"),
    [
        (3, 4, 1, Split(), "≤ 3"),
        (7, 4, 2, Split(), "≤ 7"),
        (30, 4, 2, Split(even=True), "6 or 10"),
        (126, 16, 1, Split(even=True), "14 or 18"),
        (61, 16, 1, Split(first=4, last=2), "42 or 56 are left"),
        (61, 2, 1, Split(first=3, last=2), "last_stage_layers = 61"),
        (61, 1, 1, Split(first=3, last=2), "pp = 2"),
        (14, 4, 2, Split(first=3, last=3), "2 or 4"),
        (8, 2, 1, Split(explicit=(3, 4)), "sum is 8"),
        (8, 2, 1, Split(explicit=(3, 5, 0)), "2 numbers"),
        (8, 2, 1, Split(explicit=(9, -1)), "0 layers or more"),
        (8, 2, 1, Split(explicit=(4, 4), first=4), "leave stage_layers out"),
        (8, 2, 1, Split(first=4, head_as_layer=True), "do not count"),
    ],
)
def test_layers_that_cannot_be_dealt_name_what_could(layers: int, p: int, v: int, split: Split, remedy: str) -> None:
    found = pipeline_faults(Pipeline("interleaved" if v > 1 else "1f1b", p, 16, v, layers, split=split))
    assert any(remedy in fault.remedy for fault in found), found
    with pytest.raises(PlanError):
        stage_layers(layers, p, v, split=split)


def test_all_faults_come_at_once() -> None:
    found = pipeline_faults(Pipeline("dualpipe", 5, 7, 1, 2), place="study")
    assert [fault.place for fault in found] == [
        "study: virtual_stages",
        "study: pp",
        "study: num_micro_batches",
        "study: num_micro_batches",
        "study: pp",
    ]


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_a_pipeline_that_memory_cannot_play_names_the_longest_that_it_can(schedule: Schedule, chunks: int) -> None:
    (fault,) = pipeline_faults(Pipeline(schedule, 1024, 4096, chunks, 1024 * chunks))
    assert "passes of micro-batches to play" in fault.problem
    most = int(fault.remedy.removeprefix("pp = ").removesuffix(" or fewer"))
    for stages in (most, 2 * most):
        line = Pipeline(schedule, stages, 40 * stages, chunks, stages * chunks)
        assert bool(pipeline_faults(line)) == (stages > most)
    assert most * chunks >= 126  # the deepest published dense model, Llama 3 405B, with a layer a chunk


def test_chunks_without_end_are_refused() -> None:
    """Not even one stage of them could be played."""
    found = pipeline_faults(Pipeline("interleaved", 2, 8, 1_000_000, 32))
    assert "fewer virtual_stages" in [fault.remedy for fault in found]


def test_buffers_of_micro_batches_without_end_are_refused() -> None:
    plan = Plan(pp=2, schedule="interleaved", virtual_stages=2, num_micro_batches=50_000)
    check(plan)
    with pytest.raises(PlanError, match="num_micro_batches = 50000 or fewer"):
        check(plan.copy_with(num_micro_batches=50_002))
    check(plan.copy_with(num_micro_batches=50_002, data_parallel="megatron", zero=1))
