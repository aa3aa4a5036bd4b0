"""Laws of pipeline orders, on drawn pipelines."""

from __future__ import annotations

from collections import Counter

from hypothesis import assume, given
from hypothesis import strategies as st

from simulator.parallel.legality.rule import Pipeline
from simulator.parallel.pipeline import (
    Split,
    held_at_first_backward,
    micro_batches,
    neighbours,
    num_positions,
    peak_in_flight,
    position,
    splits_backward,
    stage_layers,
    turns,
)
from simulator.play.engine import run
from tests.pipelines import Shape, pipeline_faults, play, programs, shapes


@given(shapes())
def test_every_micro_batch_has_one_forward_and_one_backward_in_each_chunk(shape: Shape) -> None:
    for stage in range(shape.p):
        actions = shape.order(stage)
        expected = {
            (micro_batch, chunk)
            for chunk in range(shape.v)
            for micro_batch in micro_batches(shape.schedule, shape.m, chunk)
        }
        for kind in ("F", "B"):
            assert Counter((a.micro_batch, a.chunk) for a in actions if a.kind == kind) == Counter(expected)
        left = {(a.micro_batch, a.chunk) for a in actions if a.kind == "B" and not a.whole}
        assert Counter((a.micro_batch, a.chunk) for a in actions if a.kind == "W") == Counter(left)
        assert splits_backward(shape.schedule) or not left


@given(shapes())
def test_the_orders_of_all_stages_finish_and_the_engine_agrees(shape: Shape) -> None:
    played = play(shape)
    assert run(programs(shape)).step_s == played
    assert played >= max(shape.work_s(stage) for stage in range(shape.p))


@given(shapes())
def test_what_is_sent_is_what_the_other_receives(shape: Shape) -> None:
    for stage in range(shape.p):
        for action in shape.order(stage):
            around = neighbours(shape.schedule, shape.p, stage, action, shape.v)
            if around.sends is not None:
                there, other = around.sends
                back = neighbours(shape.schedule, shape.p, there, other, shape.v)
                assert back.receives == (stage, action)
            if around.receives is not None:
                there, other = around.receives
                assert around.receives in around.after
                assert neighbours(shape.schedule, shape.p, there, other, shape.v).sends == (stage, action)


@given(shapes())
def test_in_flight_is_what_the_order_shows(shape: Shape) -> None:
    for stage in range(shape.p):
        held = [0] * shape.v
        peak = 0
        for action in shape.order(stage):
            ends = action.kind == "W" or (action.kind == "B" and action.whole)
            held[action.chunk] += (action.kind == "F") - ends
            peak = max(peak, sum(held))
        assert peak_in_flight(shape.schedule, shape.p, shape.m, stage, shape.v) == peak
        assert not any(held)


@given(shapes(), st.integers(1, 60), st.booleans(), st.booleans())
def test_layers_are_dealt_once_and_in_order(shape: Shape, num_layers: int, embedding: bool, head: bool) -> None:  # noqa: FBT001
    split = Split(embedding_as_layer=embedding, head_as_layer=head)
    positions = num_positions(shape.schedule, shape.p, shape.v)
    short = num_layers + embedding + head < positions
    asked = Pipeline(shape.schedule, shape.p, shape.m, shape.v, num_layers, split)
    assert bool(pipeline_faults(asked)) == short
    if short:
        return
    dealt = stage_layers(num_layers, shape.p, shape.v, split=split, schedule=shape.schedule)
    ways = range(2) if shape.schedule == "dualpipe" else [None]
    for way in ways:
        chunks = {
            position(shape.schedule, shape.p, stage, chunk): dealt[stage][chunk]
            for stage in range(shape.p)
            for chunk in (range(shape.v) if way is None else [way])
        }
        assert [layer for place in range(positions) for layer in chunks[place]] == list(range(num_layers))
        sizes = [len(chunks[place]) for place in range(positions)]
        sizes[0] += embedding
        sizes[-1] += head
        assert max(sizes) - min(sizes) <= 1


@given(shapes())
def test_turns_and_what_is_held_at_the_first_backward_are_what_the_order_shows(shape: Shape) -> None:
    assume(shape.schedule in ("gpipe", "1f1b", "interleaved"))
    for stage in range(shape.p):
        actions = shape.order(stage)
        kinds = "".join(action.kind for action in actions)
        asked = (shape.schedule, shape.p, shape.m, stage, shape.v)
        assert turns(*asked) == kinds.count("BF")
        run = actions[: kinds.index("B")]
        held = tuple(sum(action.chunk == chunk for action in run) for chunk in range(shape.v))
        assert held_at_first_backward(*asked) == held
