"""Several captured ranks without torch: messages and collectives that meet, those that do not, and what each rank holds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from simulator.base.errors import InputError
from simulator.formats.readers.capture import capture_of
from simulator.predict.prediction import Prediction
from simulator.predict.program import _remedied, predict_program
from simulator.spec.cluster import Cluster
from simulator.work.captured.capture import Capture, Kind
from simulator.work.captured.folding import unfolded
from simulator.work.captured.meetings import columns, lattice
from simulator.work.captured.script import captured_script
from simulator.work.script.instructions import Communicate, Launch
from validate.capture.written import folded

MIB = 1 << 20
PRODUCT = ["aten.mm.default", [[["T", "bf16", [4096, 4096], None]] * 2, []], ["T", "bf16", [4096, 4096], None]]
SEND, RECEIVE = 0, 1


def send(number: int, peer: int, size: int = MIB, batch: int = -1) -> list[int]:
    return [Kind.MESSAGE, number, SEND, 0, peer, size, 0, batch]


def receive(number: int, peer: int, size: int = MIB, batch: int = -1) -> list[list[int]]:
    return [[Kind.MESSAGE, number, RECEIVE, 0, peer, size, 0, batch], [Kind.WAIT_WORK, 0, number]]


WORK = [Kind.OPERATOR, 0, 0, 0, 0]


def stages(*events: list[list[int]], **changes: Any) -> Capture:
    """A pipeline over ranks 0, 4 … of eight, each with its own events."""
    ranks = [
        {"rank": 4 * stage, "steady": 1, "categories": {"0": "parameters"}, "answers": {}, "events": each}
        for stage, each in enumerate(
            [[Kind.ALLOCATE, 0, (stage + 1) * MIB, 0], *one] for stage, one in enumerate(events)
        )
    ]
    one = {
        "format": "shardwise capture", "version": 2, "target": "by hand", "torch": "2.13.0", "world_size": 8,
        "gpus_per_node": 8, "device": "h100-sxm5-80gb", "signatures": [PRODUCT], "names": ["", "all_reduce", "all_gather"],
        "groups": [[0, 4], [0, 1, 2, 3], [4, 5, 6, 7]], "ranks": ranks,
    }  # fmt: skip
    return capture_of(json.loads(json.dumps(one | changes)), "by hand")


def predicted(capture: Capture) -> Prediction:
    return predict_program(capture, Cluster.load("hgx-h100-8"))


def alone_s() -> float:
    """One product on each of two ranks that never meet."""
    return predicted(stages([WORK])).step_s


def test_a_stage_waits_for_what_the_one_before_it_sends() -> None:
    """Forth and back, four products one after another: 0, 4, 4, 0; side by side they would take two."""
    first = [WORK, send(0, 4), *receive(1, 4), WORK]
    second = [*receive(0, 0), WORK, WORK, send(1, 0)]
    found = predicted(stages(first, second))
    assert found.step_s > 4 * 0.95 * alone_s()
    assert [one.kind for one in found.kinds] == ["rank 0", "rank 4"]
    assert [one.num_devices for one in found.kinds] == [4, 4]
    assert found.breakdown["bubble"] == pytest.approx(found.step_s / 2, rel=0.2)
    assert found.hardware_flop_per_step == 4 * 4 * 2 * 4096**3
    assert sum(found.breakdown.values()) == pytest.approx(found.step_s)


def test_stages_that_do_not_meet_run_side_by_side() -> None:
    reduced = [Kind.COLLECTIVE, 0, 1, 0, MIB, 0]
    found = predicted(stages([WORK, reduced, send(1, 4, 1)], [WORK, reduced, *receive(1, 0, 1)]))
    assert found.step_s < 1.5 * alone_s()


def test_the_fullest_rank_is_reported() -> None:
    found = predicted(stages([WORK, send(0, 4)], [*receive(0, 0), WORK]))
    first, second = found.kinds
    assert second.memory.peak_allocated_bytes - first.memory.peak_allocated_bytes == MIB
    assert found.memory == second.memory


def test_a_batch_goes_both_ways_at_once_and_batches_one_after_another() -> None:
    """In one batch both ends send before they receive; alone, each would wait for the other for ever."""
    both = [[send(0, 4, batch=0), *receive(1, 4, batch=0)], [send(0, 0, batch=0), *receive(1, 0, batch=0)]]
    assert predicted(stages(*([*one, WORK] for one in both))).step_s > 0
    script = captured_script(capture := stages(*both), columns(capture)[0])
    lanes = [one.lane for one in script.step if isinstance(one, Communicate)]
    assert len(set(lanes)) == 2
    two = [send(0, 4, batch=0), send(1, 4, batch=1)], [*receive(0, 0, batch=0), *receive(1, 0, batch=1)]
    script = captured_script(capture := stages(*two), columns(capture)[0])
    first, second = (one for one in script.step if isinstance(one, Communicate))
    assert second.after == (first.label,)


def test_ranks_that_both_send_first_hang_as_on_gpus() -> None:
    with pytest.raises(InputError, match=r"(?s)the programs cannot finish.*rank0.*send to 4.*rank4.*send to 0") as told:
        predicted(stages([send(0, 4), *receive(1, 4), WORK], [send(0, 0), *receive(1, 0), WORK]))
    assert "batch_isend_irecv" in str(told.value)


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ([send(0, 4)], [WORK, send(1, 0), *receive(2, 0, 2 * MIB)], "rank 0 sends 1.00 MiB, and rank 4 receives 2.00 MiB"),
        ([send(0, 4), send(1, 4)], receive(0, 0), "message 1 from rank 0 to rank 4: rank 0 sends 1.00 MiB, and rank 4 receives nothing more"),
        (receive(0, 4), [send(0, 0), *receive(1, 0)], "message 0 from rank 0 to rank 4: rank 0 sends nothing more"),
        (
            [send(0, 4), [Kind.COLLECTIVE, 1, 1, 0, MIB, 0]],
            [*receive(0, 0), [Kind.COLLECTIVE, 1, 2, 0, MIB, 0]],
            "collective 0 of ranks 0 and 4 in a group of 2: rank 0 calls all_reduce of 1.00 MiB, and rank 4 all_gather",
        ),
    ],
)  # fmt: skip
def test_ranks_that_do_not_agree(first: list[list[int]], second: list[list[int]], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        predicted(stages(first, second))


def test_a_rank_captured_to_compare_is_told_and_not_played() -> None:
    """Ranks 0 and 4 without messages between them: equal, then unlike."""
    mine, theirs = ([Kind.COLLECTIVE, 0, 1, group, MIB, 0] for group in (1, 2))
    same = predicted(stages([WORK, mine], [WORK, theirs]))
    assert same.kinds == ()
    assert any(one.what == "rank 4" and "the same collectives as rank 0" in one.detail for one in same.sources)
    more = predicted(stages([WORK, mine], [WORK, theirs, theirs]))
    told = next(one for one in more.sources if one.what == "rank 4")
    assert "collective 1 of rank 0 is none, of rank 4 all_reduce of 1.00 MiB among 4" in told.detail
    assert told.kind == "assumed"


def test_groups_as_lattices() -> None:
    assert lattice(range(8)) == "8:1"
    assert lattice([16 * far + near for far in range(4) for near in range(2)]) == "2:1,4:16"
    assert lattice([5]) == "1:1"
    assert lattice([3, 2, 1, 0]) == "4:1"  # whatever the order
    assert lattice([0, 1, 3]) == "3:1"  # no lattice: as many, as far apart on average


def test_ranks_share_prices_where_their_operators_are_one_table() -> None:
    """A rewritten rank has operators of its own, behind the same numbers."""
    both = columns(stages([WORK, send(0, 4)], [*receive(0, 0), WORK]))[0]
    first, second = both.captures
    other = replace(second, signatures=[("aten.relu.default", *second.signatures[0][1:])])
    prices: dict[int, Any] = {}
    kernels = [
        [each.kernels for each in captured_script(one, both, prices).step if isinstance(each, Launch)]
        for one in (first, second, other)
    ]
    assert kernels[0][0] is kernels[1][0]
    assert kernels[2][0] != kernels[0][0]


def test_what_cannot_fit_on_one_rank_is_not_looked_at_on_the_next() -> None:
    program = stages([[Kind.ALLOCATE, 1, 2**40, 0], WORK, send(0, 4)], [*receive(0, 0), WORK])
    scripts: dict[int, Any] = {}
    assert _remedied(program, Cluster.load("hgx-h100-8"), scripts=scripts) is None
    assert list(scripts) == [0]


def test_equal_operators_of_other_layers_stay_apart() -> None:
    """Folding tells a layer by how far its number is from the last one: the same token may be any layer."""
    order = [1, 1, 2, 2, 1, 1, 2, 1]
    events = [[Kind.OPERATOR, 0, 0, name, 0] for name in order]
    one = {"rank": 0, "steady": 0, "categories": {}, "answers": {}, "events": events}
    data = {"names": ["", "layers.3.mlp", "layers.4.mlp"], "ranks": [one]}
    found = unfolded(folded(data))
    assert [found["names"][event[3]] for event in found["ranks"][0]["events"]] == [data["names"][n] for n in order]


def test_a_collective_of_one_rank_takes_nothing() -> None:
    """DistributedDataParallel on one GPU reduces all the same."""
    reduces = [Kind.COLLECTIVE, 0, 1, 0, MIB, 0]
    one = {"world_size": 1, "groups": [[0]]}
    found = [predict_program(stages(each, **one), Cluster.load("1xh100")) for each in ([WORK], [WORK, reduces])]
    assert found[1].step_s == found[0].step_s
