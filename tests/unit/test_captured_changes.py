"""What is made of captures: checkpoints, activations in host memory, other numbers of ranks, authors' costs. Without torch."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import InputError
from simulator.base.fit import Fit
from simulator.base.kernels import Gemm, Stated, Stream
from simulator.formats.readers.capture import capture_of, kind_of
from simulator.memory.history import script_history, step_live_bytes
from simulator.predict.program import predict_program
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.tiers import ADAM_BYTES_PER_NUMEL
from simulator.work.captured.capture import Capture, Kind, Phase
from simulator.work.captured.changed import checkpointed, forwards, offloaded
from simulator.work.captured.cost import COSTS, KernelCost, kernel_cost
from simulator.work.captured.kernels import priced
from simulator.work.captured.scaled import scaled
from simulator.work.captured.script import captured_script
from simulator.work.captured.tensors import parsed
from simulator.work.captured.updated import Update, optimizer_in_host, update_of
from simulator.work.script.instructions import Launch
from validate.capture.log import cost_of

SIZE = 4096 * 4096 * 2  # bytes of each tensor below
MM = ["aten.mm.default", [[["T", "bf16", [4096, 4096], None]] * 2, []], ["T", "bf16", [4096, 4096], None]]
LAYERS = 4
FORWARD, BACKWARD, OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER


def layered(micro_batches: int = 1, **changes: Any) -> Capture:
    """LAYERS modules, each of three products: what the first two make is saved, as is the third's, its result.

    Storage 0 is a parameter. Backward each layer has a product behind which its saved storages go, the last first. Micro-batches
    all go forward, and come back in the same order, as through a pipeline.
    """
    events: list[list[int]] = [[Kind.ALLOCATE, 0, SIZE, 0]]
    steady, number = len(events), 1
    made: list[list[int]] = []
    for layer in list(range(LAYERS)) * micro_batches:
        made.append([])
        for _ in range(3):
            events += [[Kind.OPERATOR, 0, 0, 1 + layer, FORWARD], [Kind.ALLOCATE, number, SIZE, 0]]
            made[-1].append(number)
            number += 1
    for each in (one for at in range(0, len(made), LAYERS) for one in reversed(made[at : at + LAYERS])):
        events += [[Kind.OPERATOR, 0, 0, 0, BACKWARD], *([Kind.FREE, one] for one in reversed(each))]
    events += [[Kind.OPERATOR, 0, 0, 0, OPTIMIZER], [Kind.STEP, 3]]
    categories = {"0": "parameters"} | {str(one): "activations" for one in range(1, number)}
    data = {
        "format": "shardwise capture", "version": 1, "target": "layers", "torch": "2.13.0", "rank": 0, "world_size": 8,
        "gpus_per_node": 8, "device": "h100-sxm5-80gb", "steady": steady, "signatures": [MM],
        "names": ["", *(f"body.layers.{i}.mlp" for i in range(LAYERS))], "groups": [list(range(8))],
        "categories": categories, "answers": {}, "events": events,
    }  # fmt: skip
    return capture_of(json.loads(json.dumps(data | changes)), "layers")


def peak(capture: Capture) -> int:
    script = captured_script(capture)
    return step_live_bytes(script_history(script.step, script.before)).peak[0]


def products(capture: Capture) -> int:
    return sum(isinstance(one, Launch) for one in captured_script(capture).step)


def test_forwards_are_found_by_the_numbers_in_their_modules_names() -> None:
    found = forwards(layered())
    assert [one.number for one in found] == list(range(LAYERS))
    assert all(one.saved_bytes == 2 * SIZE for one in found)  # the third is the result, which stays


def test_a_checkpoint_frees_what_is_saved_and_runs_it_again() -> None:
    """All save 3 tensors a layer; checkpointed, one a layer and what one layer needs while it runs."""
    plain = layered()
    changed = checkpointed(plain)
    assert changed is not None
    assert peak(plain) == (1 + 3 * LAYERS) * SIZE
    assert peak(changed) == (1 + LAYERS + 2) * SIZE
    # torch stops behind the last tensor that the backward needs: two products a layer run again, not three
    assert products(changed) == products(plain) + 2 * LAYERS
    half = checkpointed(plain, every=2)
    assert half is not None
    assert peak(changed) < peak(half) < peak(plain)


def test_a_program_without_repeated_modules_has_no_checkpoints() -> None:
    assert checkpointed(layered(names=["", *("mlp" for _ in range(LAYERS))])) is None


def test_activations_in_host_memory_come_back_before_their_backward() -> None:
    """At 1 GB/s, slower than products, each byte that leaves is waited for: twice what the copies take, at least."""
    plain, rate = layered(), 1e9
    changed = offloaded(plain, rate, rate)
    assert changed is not None
    assert peak(changed) < peak(plain)
    before, after = (predict_program(one, Cluster.load("hgx-h100-8"), Calibration.ideal()) for one in (plain, changed))
    moved_s = 2 * (LAYERS - 1) * 2 * SIZE / rate
    assert after.step_s >= moved_s
    assert after.breakdown["exposed:offload"] == pytest.approx(after.step_s - before.step_s, rel=0.1)


ADAM = ["aten._fused_adamw_.default", [[[["T", "bf16", [4096, 4096], None]], [], [], []], []], None]
CLIP = ["aten.clone.default", [[["T", "bf16", [4096, 4096], None]], []], ["T", "bf16", [4096, 4096], None]]


def updated(kernels: list[int]) -> Capture:
    """A parameter with its gradient and two states, all of SIZE; `kernels` of ADAM and CLIP make a step of two temporaries."""
    storages = [[Kind.ALLOCATE, number, SIZE, 0] for number in range(4)]
    step = [[Kind.OPERATOR, 0, 0, 0, BACKWARD]]
    for number in kernels:
        step += [[Kind.OPERATOR, number, 0, 0, OPTIMIZER], [Kind.ALLOCATE, 9, SIZE, 0], [Kind.FREE, 9]] * 2
    categories = dict(zip("0123", ["parameters", "gradients", *["optimizer_state"] * 2], strict=True))
    changes: dict[str, Any] = {"categories": categories, "events": [*storages, *step, [Kind.STEP, 3]]}
    return layered(signatures=[MM, ADAM, CLIP], steady=len(storages), **changes)


def test_an_optimizer_in_host_memory_leaves_parameters_and_gradients() -> None:
    """Behind the backward: gradients down, the CPU's update of all ranks of the node, parameters up, each waited for."""
    plain, cluster = updated([1]), Cluster.load("hgx-h100-8")
    tier = cluster.host_tier
    assert tier is not None
    changed = optimizer_in_host(plain, tier, 8)
    assert changed is not None
    assert update_of(plain) == Update(2 * SIZE // 2, 2 * SIZE, SIZE, SIZE)  # two kernels, each of every parameter
    assert peak(plain) == 5 * SIZE  # a temporary beside
    assert peak(changed) == 2 * SIZE
    update_s = 8 * SIZE * max(1 / tier.adam_numel_per_s, ADAM_BYTES_PER_NUMEL / tier.memory_bytes_per_s)
    rates = (min(rate, tier.memory_bytes_per_s / 8) for rate in (tier.d2h_bytes_per_s, tier.h2d_bytes_per_s))
    found = predict_program(changed, cluster, Calibration.ideal()).breakdown
    assert found["offload"] == pytest.approx(update_s + sum(SIZE / rate for rate in rates))
    assert "optimizer" not in found


def test_an_optimizer_of_other_kernels_stays() -> None:
    tier = Cluster.load("hgx-h100-8").host_tier
    assert tier is not None
    assert update_of(updated([2])) is None
    assert optimizer_in_host(updated([2]), tier, 8) is optimizer_in_host(layered(), tier, 8) is None


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_storages_leave_and_come_back_before_they_are_needed_in_any_order_of_backwards(micro_batches: int) -> None:
    """What the first forwards of a pipeline saved is needed first, not last."""
    capture = layered(micro_batches)
    found = [checkpointed(capture), checkpointed(capture, 2), offloaded(capture, 1e10, 1e10)]
    for one in found:
        assert one is not None
        alive: set[int] = set()
        for kind, storage, *_ in one.events:
            if kind == Kind.ALLOCATE:
                assert storage not in alive
                alive.add(storage)
            elif kind == Kind.FREE:
                alive.remove(storage)
        assert alive == {0}
        assert peak(one) <= peak(capture)
    # two stay: the last forward, behind which no other hides the copy, and the one whose backward is the first of all
    leave = [event for event in found[2].events if event[0] == Kind.OPERATOR and event[1] > 0]  # type: ignore[union-attr]
    assert len(leave) == 2 * (LAYERS * micro_batches - (1 if micro_batches == 1 else 2))


def test_a_program_that_does_not_fit_gets_remedies_that_do() -> None:
    small = Cluster.load("hgx-h100-8")
    device = small.device.model_copy(update={"memory_bytes": 7 * 2**30, "cuda_memory_bytes": None})
    cluster = small.model_copy(update={"device": device})
    capture = layered(events=_times(layered().events, 20))
    found = predict_program(capture, cluster, advise=True)
    assert found.verdict is Fit.DOES_NOT_FIT
    assert found.remedies
    assert list(found.remedies) == sorted(found.remedies, key=lambda remedy: remedy.cost)
    assert any("checkpoint" in remedy.change for remedy in found.remedies)
    assert all(remedy.used_bytes < found.memory.used_bytes or "--cluster" in remedy.change for remedy in found.remedies)


def test_larger_gpus_are_predicted_as_a_question_about_them_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory too, which is not played anew where libraries hold as much: of a GPU with less memory, what that is of others."""
    monkeypatch.setattr(import_module("simulator.predict.program_remedies"), "NUM_REMEDIES", 99)
    small = Cluster.load("hgx-h100-8")
    device = small.device.model_copy(update={"memory_bytes": 7 * 2**30, "cuda_memory_bytes": None})
    capture = layered(events=_times(layered().events, 20))
    found = predict_program(capture, small.model_copy(update={"device": device}), advise=True)
    (remedy,) = (one for one in found.remedies if one.change.startswith("--cluster "))
    place = Cluster.load(remedy.change.removeprefix("--cluster "))
    there = predict_program(capture, place.with_nodes(capture.world_size // place.gpus_per_node))
    assert (remedy.step_s, remedy.used_bytes) == (there.step_s, there.memory.used_bytes)
    assert remedy.peak_reserved_bytes == there.memory.peak_reserved_bytes


def _times(events: Any, factor: int) -> list[list[int]]:
    return [[*e[:2], e[2] * factor, *e[3:]] if e[0] == Kind.ALLOCATE and e[1] else list(e) for e in events]


# -- other numbers of ranks

WHOLE = 1_000_003  # elements of a parameter, which no number of ranks divides


def sharded(ranks: int) -> Capture:
    """A shard of WHOLE, gathered into `ranks` pieces and copied."""
    shard = -(-WHOLE // ranks)
    pieces = ["aten.clone.default", [[["T", "fp32", [ranks, 7], None]], []], ["T", "fp32", [ranks, 7], None]]
    own = ["aten.neg.default", [[["T", "fp32", [shard], None]], []], ["T", "fp32", [shard], None]]
    events = [
        [Kind.ALLOCATE, 0, shard, 0],
        [Kind.OPERATOR, 0, 0, 0, FORWARD],
        [Kind.OPERATOR, 1, 0, 0, FORWARD],
        [Kind.COLLECTIVE, 0, 1, 0, 4096, 0],
        [Kind.STEP, 3],
    ]
    return layered(
        world_size=ranks, signatures=[own, pieces], names=["", "all_gather"], groups=[list(range(ranks))],
        events=events, categories={"0": "parameters"}, steady=1,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [24, 64, 512])
def test_sizes_at_other_ranks_follow_from_two_captures(ranks: int) -> None:
    found, real = scaled(sharded(8), sharded(16), ranks), sharded(ranks)
    assert (found.world_size, found.groups) == (ranks, real.groups)
    assert captured_script(found).step == captured_script(real).step
    assert captured_script(found).before == captured_script(real).before
    assert any("from captures at 8 and 16" in what for what in found.answers)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"world_size": 8}, "both have as many ranks"),
        ({"events": [[Kind.ALLOCATE, 0, 5, 0], [Kind.STEP, 3]]}, "one of them does more"),
        ({"signatures": [MM, MM]}, "aten.neg.default in one where the other has aten.mm.default"),
    ],
)
def test_programs_that_change_with_their_ranks_are_refused(changes: dict[str, Any], problem: str) -> None:
    one = sharded(16)
    data = {
        "world_size": 16, "signatures": one.signatures, "names": one.names, "groups": one.groups, "events": one.events,
        "categories": {"0": "parameters"}, "steady": 1,
    }  # fmt: skip
    with pytest.raises(InputError, match=problem) as told:
        scaled(sharded(8), layered(**(data | changes)), 64)
    assert "--ranks 64" in str(told.value)


# -- what authors say


def test_an_authors_cost_counts_instead_of_bytes() -> None:
    args = (parsed([["T", "bf16", [1000], None]]), ())
    one = priced("mylib.magic.default", args, parsed(["T", "bf16", [1000], None]), KernelCost(flop=10**12, bytes=10**6))
    assert one.known
    assert one.kernels == (Stated(flop=10**12, num_bytes=10**6),)
    cluster = Cluster.load("hgx-h100-8")
    clock = Calibration.ideal().timer(cluster.device)
    assert clock.kernel_s(one.kernels[0]) == pytest.approx(10**12 / cluster.device.peak("bf16"))
    moved = KernelCost(bytes=10**9).kernel
    assert clock.kernel_s(moved) == pytest.approx(10**9 / cluster.device.memory_bytes_per_s)
    stated = KernelCost(bytes=10**9, seconds=0.5).kernel
    assert clock.kernel_s(stated) == 0.5


def test_a_capture_keeps_costs_as_values() -> None:
    magic = ["mylib.magic.default", [[], []], ["T", "bf16", [1000], None]]
    cost = asdict(KernelCost(seconds=0.25, category="mine"))
    one = layered(
        signatures=[MM, magic], costs={"1": cost}, events=[[Kind.OPERATOR, 1, 0, 0, 0], [Kind.STEP, 3]], steady=0
    )
    found = predict_program(one, Cluster.load("hgx-h100-8"), Calibration.ideal())
    assert found.breakdown["mine"] == pytest.approx(0.25)
    assert not any(source.what == "no rule" for source in found.sources)
    with pytest.raises(InputError, match=r"costs\.7"):
        layered(costs={"7": cost})
    with pytest.raises(InputError, match=r"costs\.0"):
        layered(costs={"0": {"flop": -1}})
    with pytest.raises(InputError, match="no number of tokens"):
        layered(tokens_per_step="many")


def test_costs_are_found_by_name_and_checked() -> None:
    kernel_cost("unittest::one")(lambda x: KernelCost(flop=x))
    kernel_cost("unittest::two")(lambda _: 3)
    try:
        assert cost_of("unittest.one.default", (5,), {}) == KernelCost(flop=5)
        assert cost_of("unittest.other.default", (5,), {}) is None
        with pytest.raises(ValueError, match="unittest::one raised TypeError"):
            cost_of("unittest.one.default", (), {})
        with pytest.raises(ValueError, match="returned int"):
            cost_of("unittest.two.default", (5,), {})
    finally:
        del COSTS["unittest::one"], COSTS["unittest::two"]
    with pytest.raises(ValueError, match="mylib::swiglu"):
        kernel_cost("no name")


@pytest.mark.parametrize(
    "wrong", [{}, {"flop": -1}, {"seconds": float("nan")}, {"bytes": "8"}, {"flop": 1, "dtype": "int4"}]
)
def test_costs_that_nothing_can_have(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"flop|dtype"):
        KernelCost(**wrong)


# -- prices of what is not a product


def tensor(*shape: int, dtype: str = "bf16") -> list[Any]:
    return ["T", dtype, list(shape), None]


def kernels(name: str, positional: list[Any], results: list[Any], **named: Any) -> tuple[Any, ...]:
    one = priced(name, (parsed(positional), tuple(named.items())), parsed(results))
    assert one.known
    return one.kernels


def test_gathers_and_scatters_move_what_their_indices_name() -> None:
    """Rows of a large table: the table is not read whole, nor written where rows are put into it in place."""
    table, rows, index = tensor(10**6, 64), tensor(100, 64), tensor(100, dtype="int64")
    (picked,) = kernels("aten.index.Tensor", [table, [index]], rows)
    assert picked.num_bytes == 2 * 12_800 + 800
    (put,) = kernels("aten.index_put_.default", [table, [index], rows], table)
    assert put.num_bytes == 3 * 12_800 + 800
    copy, _ = kernels("aten.index_put.default", [table, [index], rows], table)
    assert (copy.op, copy.num_bytes) == ("copy", 2 * 128 * 10**6)


def test_a_sort_passes_once_for_each_byte_of_a_key() -> None:
    keys = tensor(1000, dtype="int64")
    (one,) = kernels("aten.sort.default", [keys], [keys, keys])
    assert one.launches == 9
    assert one.num_bytes == 8000 + 8 * 2 * 16_000


def test_lists_of_tensors_are_read_and_written_as_their_operator_does() -> None:
    p = [tensor(1000, dtype="fp32")] * 40
    (add,) = kernels("aten._foreach_add_.List", [p, p], [])
    assert (add.read_bytes, add.write_bytes, add.launches) == (320_000, 160_000, 2)
    (addcmul,) = kernels("aten._foreach_addcmul_.Scalar", [p, p, p], [])
    assert (addcmul.read_bytes, addcmul.write_bytes) == (480_000, 160_000)
    (copied,) = kernels("aten._foreach_copy_.default", [p, p], [])
    assert (copied.read_bytes, copied.write_bytes) == (160_000, 160_000)
    (sgd,) = kernels("aten._fused_sgd_.default", [p, p, p], [])
    assert (sgd.read_bytes, sgd.write_bytes, sgd.launches) == (480_000, 320_000, 2)


def test_a_depthwise_convolution_is_a_stream() -> None:
    x, w = tensor(8, 256, 56, 56), tensor(256, 1, 3, 3)
    (one,) = kernels("aten.convolution.default", [x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 256], x)
    assert isinstance(one, Stream)
    assert one.num_bytes == 2 * (2 * 8 * 256 * 56 * 56 + 256 * 9)


def test_scales_of_blocks_and_integers() -> None:
    a, b = tensor(256, 512, dtype="fp8"), tensor(512, 256, dtype="fp8")
    (rows,) = kernels(
        "aten._scaled_mm.default", [a, b, tensor(256, 1, dtype="fp32"), tensor(1, 256, dtype="fp32")], tensor(256, 256)
    )
    (blocks,) = kernels(
        "aten._scaled_mm.default", [a, b, tensor(256, 4, dtype="fp32"), tensor(4, 2, dtype="fp32")], tensor(256, 256)
    )
    assert isinstance(rows, Gemm)
    assert (rows.by_blocks, blocks.by_blocks) == (False, True)
    (whole,) = kernels(
        "aten._int_mm.default",
        [tensor(32, 64, dtype="int8"), tensor(64, 32, dtype="int8")],
        tensor(32, 32, dtype="int32"),
    )
    assert whole.dtype == "fp8"


def test_cudnns_attention_is_attention() -> None:
    q = tensor(2, 32, 1024, 128)
    (one,) = kernels("aten._scaled_dot_product_cudnn_attention.default", [q, q, q, None, True, 0.0, True], [q])
    (flash,) = kernels("aten._scaled_dot_product_flash_attention.default", [q, q, q, 0.0, True], [q])
    assert one == flash
    args = [q, q, q, q, q, None, None, None, None, None, None, 1024, 1024, 0.0, True]
    (back,) = kernels("aten._scaled_dot_product_cudnn_attention_backward.default", args, [q, q, q])
    assert (back.direction, back.causal) == ("backward", True)


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("study", b"[plan]\nzero = 3\n", "other"),
        ("study.toml", b"[plan]\ndata_parallel = fsdp2\n", "other"),  # a mistake, and Python
        ("study", b"model = llama\n", "other"),
        ("train", b"import torch\n\n\ndef step():\n    pass\n", "script"),
        ("train.py", b"print 'no Python of today'\n", "script"),
        ("step", gzip.compress(b"{}", mtime=0), "packed"),
        ("step.toml", gzip.compress(b"{}", mtime=0), "packed"),
        ("notes.txt", b"\xff\xfe", "other"),
        ("empty", b"", "other"),
    ],
)
def test_what_a_file_holds_decides_whether_it_is_a_program(tmp_path: Path, name: str, data: bytes, kind: str) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    assert kind_of(file) == kind


def test_a_file_that_is_not_there_is_what_its_name_says(tmp_path: Path) -> None:
    kinds = [kind_of(tmp_path / name) for name in ("a.gz", "a.py", "a.toml")]
    assert kinds == ["packed", "script", "other"]
