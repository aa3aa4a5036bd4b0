"""Captured programs without torch: operators as kernels, streams and events as a script, and files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import InputError
from simulator.base.kernels import Attention, Gemm, Stream
from simulator.cli import main
from simulator.formats.readers.capture import capture_of, read_capture
from simulator.memory.allocator import CachingAllocator
from simulator.memory.driver_costs import DriverCosts
from simulator.memory.history import script_history, step_live_bytes, step_reserved_bytes
from simulator.memory.outside import workspace_bytes
from simulator.play.lower.work import Clock
from simulator.predict import Prediction
from simulator.predict.prediction import OWN_ALLOCATOR
from simulator.predict.program import predict_program, usual_stack
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.plan.memory import BLOCK_BYTES, MemoryPlan
from simulator.spec.software.stack import Stack
from simulator.work.captured.capture import CPU, Kind, Phase
from simulator.work.captured.kernels import priced
from simulator.work.captured.script import captured_script
from simulator.work.captured.tensors import parsed
from simulator.work.script.instructions import LAUNCH_QUEUE, Communicate, Launch
from tests.captures import data
from validate.capture.written import write_capture


def tensor(*shape: int, dtype: str = "bf16", strides: list[int] | None = None) -> list[Any]:
    return ["T", dtype, list(shape), strides]


def kernels(name: str, positional: list[Any], results: list[Any], **named: Any) -> tuple[Any, ...]:
    one = priced(name, (parsed(positional), tuple(named.items())), parsed(results))
    assert one.known
    return one.kernels


def test_products_by_their_shapes_and_layouts() -> None:
    x, w = tensor(64, 128), tensor(128, 256, strides=[1, 128])
    (forward,) = kernels("aten.mm.default", [x, w], tensor(64, 256))
    assert isinstance(forward, Gemm)
    assert (forward.m, forward.n, forward.k, forward.layout, forward.dtype) == (64, 256, 128, "tn", "bf16")
    (data,) = kernels("aten.mm.default", [tensor(64, 256), tensor(256, 128)], tensor(64, 128))
    assert data.layout == "nn"
    (weight,) = kernels("aten.mm.default", [tensor(256, 64, strides=[1, 256]), tensor(64, 128)], tensor(256, 128))
    assert (weight.layout, weight.flop) == ("nt", forward.flop)
    (batched,) = kernels("aten.baddbmm.default", [tensor(8, 4, 6), tensor(8, 4, 5), tensor(8, 5, 6)], tensor(8, 4, 6))
    assert batched.flop == 8 * 2 * 4 * 5 * 6


@pytest.mark.parametrize("both", [False, True])
def test_recurrent_layers_multiply_what_their_steps_do(*, both: bool) -> None:
    """An LSTM's gates, four of 16 each: of every step and layer, from its input and its state; backward twice that."""
    ways, rows = 1 + both, 10 * 4
    x, state, out = tensor(10, 4, 8), tensor(2 * ways, 4, 16), tensor(10, 4, 16 * ways)
    how = [2, 16, 0, 2, False, 0.0, True, both, [], None]
    layers = sum(ways * 2 * rows * 64 * (inputs + 16) for inputs in (8, 16 * ways))
    forward = kernels("aten._cudnn_rnn.default", [x, [], 4, None, state, state, *how], [out])
    assert sum(one.flop for one in forward) == layers
    given = [x, [], 4, out, state, state, out, out, None, None, *how, out, [True] * 4]
    backward = kernels("aten._cudnn_rnn_backward.default", given, [x])
    assert sum(one.flop for one in backward) == 2 * layers
    assert sum(one.launches for one in backward) == 1  # a call of the host
    steps = [one for one in forward if isinstance(one, Gemm) and one.m == 4]
    assert len(steps) == 10 * (2 if both else 1)  # the layers of one direction run beside each other


def test_a_compiled_program_runs_on_the_compiled_stack() -> None:
    fused = ["inductor.fused.default", [[tensor(64, 64)], []], [tensor(64, 64)]]
    one = data(2)
    assert usual_stack(capture_of(one, "eager")).name == "torch-2.11-eager"
    compiled = capture_of({**one, "signatures": [*one["signatures"], fused]}, "compiled")
    assert usual_stack(compiled).name == "torch-2.11-compiled"


def test_a_complex_product_is_four_real_ones() -> None:
    (one,) = kernels("aten.bmm.default", [tensor(8, 4, 6, dtype="complex64"), tensor(8, 6, 5, dtype="complex64")], [])
    assert one.flop == 4 * 8 * 2 * 4 * 6 * 5


def test_distances_are_a_product_and_other_sizes_are_known() -> None:
    product, root = kernels("aten._euclidean_dist.default", [tensor(64, 16), tensor(32, 16)], tensor(64, 32))
    assert (product.flop, root.launches) == (2 * 64 * 32 * (16 + 2), 2)
    for name in ("upsample_linear1d", "max_pool3d_with_indices_backward", "reflection_pad1d"):
        assert kernels(f"aten.{name}.default", [tensor(2, 8, 64)], tensor(2, 8, 128))


@pytest.mark.parametrize(
    ("a", "b", "made"),
    [
        ((64, 16), (8, 16, 32), (64, 32)),  # each expert its rows
        ((16, 64), (64, 32), (8, 16, 32)),  # and the gradient of its weights
        ((8, 16, 32), (32, 64), (16, 64)),
        ((8, 8, 16), (8, 16, 32), (8, 8, 32)),  # padded to the fullest
    ],
)
def test_products_of_experts_in_every_way_that_they_share_a_dim(a: Any, b: Any, made: Any) -> None:
    """Two FLOP for each pair of elements that meet: 8 experts in all, of which each has an eighth of what is shared."""
    (one,) = kernels("aten._grouped_mm.default", [tensor(*a), tensor(*b)], tensor(*made))
    assert isinstance(one, Gemm)
    assert one.flop == 2 * 64 * 16 * 32
    assert one.batch == 8


def test_the_gradient_of_a_part_is_zeros_and_a_copy() -> None:
    """Of one of 8 matrices, which lies in one piece, and of half of every row, which does not. 2 bytes each."""
    whole, part = 8 * 64 * 32 * 2, 64 * 32 * 2
    for name, args, size, op in (
        ("select_backward", [tensor(64, 32), [8, 64, 32], 0, 3], part, "copy"),
        ("slice_backward", [tensor(8, 64, 16), [8, 64, 32], 2, 0, 16, 1], whole // 2, "strided"),
    ):
        zeros, copied = kernels(f"aten.{name}.default", args, tensor(8, 64, 32))
        assert (zeros.op, zeros.read_bytes, zeros.write_bytes) == ("memset", 0, whole)
        assert (copied.op, copied.read_bytes, copied.write_bytes) == (op, size, size)
    (alone,) = kernels("aten.slice_backward.default", [tensor(0, 32), [8, 32], 0, 0, 0, 1], tensor(8, 32))
    assert alone.op == "memset"


def test_a_convolution_is_its_implicit_product() -> None:
    """3 × 3 over 32 × 32 positions, 16 channels to 64: two FLOP a product."""
    args = [tensor(2, 16, 32, 32), tensor(64, 16, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    (one,) = kernels("aten.convolution.default", args, tensor(2, 64, 32, 32))
    assert one.flop == 2 * (2 * 32 * 32) * 64 * (16 * 9)
    back = [tensor(2, 64, 32, 32), *args[:2], [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]]
    both = kernels("aten.convolution_backward.default", back, [tensor(2, 16, 32, 32), tensor(64, 16, 3, 3)])
    assert sum(kernel.flop for kernel in both) == 2 * one.flop


def test_attention_of_grouped_heads() -> None:
    q, kv = tensor(2, 32, 4096, 128), tensor(2, 8, 4096, 128)
    (one,) = kernels("aten._scaled_dot_product_flash_attention.default", [q, kv, kv, 0.0, True], [q])
    assert isinstance(one, Attention)
    assert (one.num_heads, one.num_kv_heads, one.causal) == (32, 8, True)
    assert one.flop == 2 * 2 * 2 * 32 * 4096 * 4096 * 128 // 2
    args = [q, q, kv, kv, q, None, None, None, 4096, 4096, 0.0, True, None, None]
    (back,) = kernels("aten._scaled_dot_product_flash_attention_backward.default", args, [q, kv, kv])
    assert back.direction == "backward"
    assert back.flop == one.flop * 5 // 2


def test_passes_over_memory_by_their_bytes() -> None:
    x, row = tensor(8, 1024), tensor(8, 1)
    (add,) = kernels("aten.add.Tensor", [x, x], x)
    assert (add.op, add.read_bytes, add.write_bytes) == ("elementwise", 4 * 8192, 2 * 8192)
    (scaled,) = kernels("aten.mul.Tensor", [x, row], x)
    assert (scaled.op, scaled.numel) == ("strided", 8192)  # an address for each element
    (narrow,) = kernels("aten._to_copy.default", [tensor(8, 1024, dtype="fp32")], x)
    assert (narrow.op, narrow.num_bytes) == ("cast", 6 * 8192)
    (wide,) = kernels("aten._to_copy.default", [x], tensor(8, 1024, dtype="fp32"))
    assert wide.op == "widen"
    (sent,) = kernels("aten._to_copy.default", [[*x, "cpu"]], x)
    assert (sent.over, sent.num_bytes) == ("pageable", 2 * 8192)  # over PCIe
    p = tensor(1000, dtype="fp32")
    (update,) = kernels("aten._fused_adamw_.default", [[p], [p], [p], [p], [], [tensor(1, dtype="fp32")]], [])
    assert (update.read_bytes, update.write_bytes) == (16_000, 12_000)


def test_what_no_rule_knows_is_priced_by_its_bytes_and_named() -> None:
    one = priced("mylib.magic.default", (parsed([tensor(1000)]), ()), parsed(tensor(1000)))
    assert not one.known
    assert one.kernels == (Stream(op="elementwise", read_bytes=2000, write_bytes=2000),)


# -- a program by hand: a gather on stream 2 behind a copy on stream 1; the main stream waits for it before its product

MM = ["aten.mm.default", [[tensor(512, 512), tensor(512, 512)], []], tensor(512, 512)]
COPY = ["aten.clone.default", [[tensor(4096)], []], tensor(4096)]
GATHER = 8192 * 8


def capture(**changes: Any) -> dict[str, Any]:
    events = [
        [Kind.ALLOCATE, 0, 1 << 20, 0],
        [Kind.OPERATOR, 1, 1, 0, 0],
        [Kind.RECORD, 7, 1],
        [Kind.WAIT_EVENT, 2, 7],
        [Kind.COLLECTIVE, 0, 1, 0, GATHER, 2],
        [Kind.ALLOCATE, 1, GATHER, 0],
        [Kind.OPERATOR, 0, 0, 0, 0],
        [Kind.WAIT_WORK, 0, 0],
        [Kind.OPERATOR, 0, 0, 0, 1],
        [Kind.SYNCHRONIZE, 0],
        [Kind.FREE, 1],
        [Kind.STEP, 3],
    ]
    one = {
        "format": "shardwise capture", "version": 1, "target": "by hand", "torch": "2.13.0", "rank": 0, "world_size": 8,
        "gpus_per_node": 8, "device": "h100-sxm5-80gb", "steady": 1, "signatures": [MM, COPY], "names": ["", "all_gather"],
        "groups": [list(range(8))], "categories": {"0": "parameters", "1": "all_gather"}, "answers": {}, "events": events,
    }  # fmt: skip
    return json.loads(json.dumps(one | changes))  # type: ignore[no-any-return]  as a file holds it


def test_streams_and_events_say_who_waits_for_whom() -> None:
    script = captured_script(capture_of(capture(), "by hand"))
    copy, first, second = (one for one in script.step if isinstance(one, Launch))
    (gather,) = (one for one in script.step if isinstance(one, Communicate))
    assert (copy.stream, first.stream, second.stream) == (1, 0, 0)
    assert gather.after == (copy.label,)
    assert gather.role == "@8:1"
    assert first.after == ()
    assert second.after == (gather.label,)
    assert (first.waits, second.waits) == (False, True)
    assert script.flop == 2 * 2 * 512**3


def test_the_host_waits_for_an_event_and_not_for_what_came_behind_it() -> None:
    """As FSDP1's limit of all-gathers does: the product in the middle keeps the device busy while the host launches on."""
    large = json.loads(json.dumps(MM).replace("512", "8192"))
    product = [Kind.OPERATOR, 0, 0, 0, 0]

    def step_of(*events: list[int]) -> tuple[list[Launch], Prediction]:
        one = capture_of(capture(signatures=[large], events=list(events), steady=0, world_size=1), "x")
        launches = [each for each in captured_script(one).step if isinstance(each, Launch)]
        return launches, predict_program(
            one, Cluster.load("hgx-h100-8").with_nodes(1).model_copy(update={"gpus_per_node": 1})
        )

    plain = step_of(product, product, product)[1]
    (first, second, waits, _), found = step_of(product, [Kind.RECORD, 7, 0], product, [Kind.WAIT_HOST, 7], product)
    assert (waits.after, waits.waits, first.waits, second.waits) == ((first.label,), True, False, False)
    assert found.step_s == plain.step_s
    assert {span.stream for span in found.timeline.spans} == {"compute", "host"}
    behind = step_of(product, product, [Kind.RECORD, 7, 0], [Kind.WAIT_HOST, 7], product)[1]
    assert behind.step_s > plain.step_s
    of_stream = step_of(product, [Kind.OPERATOR, 0, 1, 0, 0], [Kind.SYNCHRONIZE, 0], product)[0]
    assert [each.waits for each in of_stream] == [False, False, True, False]


def test_a_step_that_waits_for_its_cpu_says_so() -> None:
    """1.2 GB of an optimizer's on the CPU, behind the last product and before the next, and an error of 0.3 of it."""
    table = [*tensor(100_000_000, dtype="fp32"), "cpu"]
    update = ["aten.add_.Tensor", [[table, table], []], table]
    events = [
        [Kind.OPERATOR, 0, 0, 0, 0],
        [Kind.SYNCHRONIZE, 0],
        [Kind.OPERATOR, 1, CPU, 0, 2],
        [Kind.OPERATOR, 0, 0, 0, 0],
    ]
    one = capture_of(capture(signatures=[MM, update], events=events, steady=0, world_size=1), "x")
    cluster = Cluster.load("hgx-h100-8").with_nodes(1).model_copy(update={"gpus_per_node": 1})
    found = predict_program(one, cluster)
    (added,) = (span for span in found.timeline.spans if span.stream == "host")
    assert found.breakdown["exposed:CPU"] == pytest.approx(added.end_s - added.start_s)
    assert sum(found.breakdown.values()) == pytest.approx(found.step_s)
    assert found.spread["CPU"] > 0.2  # nearly all of the step is this


def reserved_with(*behind: list[int]) -> int:
    """Bytes reserved by a program that frees 64 MiB which stream 1 reads, and takes as much again behind `behind`."""
    size = 64 << 20
    events = [
        [Kind.ALLOCATE, 0, size, 0],
        [Kind.OPERATOR, 1, 1, 0, 0],
        [Kind.RECORD_STREAM, 0, 1],
        [Kind.RECORD, 7, 1],
        [Kind.FREE, 0],
        *behind,
        [Kind.ALLOCATE, 1, size, 0],
        [Kind.FREE, 1],
    ]
    script = captured_script(capture_of(capture(events=events, steady=0), "by hand"))
    history = script_history(script.step)
    assert step_live_bytes(history).peak[0] == size  # torch counts a block as free at once
    return max(step_reserved_bytes(history, CachingAllocator()))


@pytest.mark.parametrize(
    ("behind", "blocks"),
    [
        ([], 2),
        ([[Kind.WAIT_EVENT, 0, 7]], 2),  # the main stream waits, of which the host knows nothing
        ([[Kind.SYNCHRONIZE, 2]], 2),
        ([[Kind.SYNCHRONIZE, 1]], 1),
        ([[Kind.SYNCHRONIZE, -1]], 1),
        ([[Kind.WAIT_HOST, 7]], 1),
        ([[Kind.WAIT_EVENT, 0, 7], [Kind.SYNCHRONIZE, 0]], 1),  # for what the main stream waited for
        ([[Kind.OPERATOR, 1, 0, 0, 0]] * LAUNCH_QUEUE, 2),
        (
            [[Kind.OPERATOR, 1, 0, 0, 0]] * (LAUNCH_QUEUE + 1),
            1,
        ),  # the queue is full: the device has begun the first of them
    ],
)
def test_what_another_stream_reads_is_reused_when_the_host_knows_that_it_was_read(
    behind: list[list[int]], blocks: int
) -> None:
    assert reserved_with(*behind) == blocks * (64 << 20)


def test_the_hook_before_a_collective_runs_on_another_stream() -> None:
    """FSDP2 copies in on one stream and gathers on the next, which waits for it: the host ran a hook all the same."""
    data = capture()
    data["signatures"].append(["fsdp.all_gather_copy_in.default", *COPY[1:]])
    events = data["events"]
    at = next(index for index, event in enumerate(events) if event[0] == Kind.COLLECTIVE)
    for hook, hooked in ((len(data["signatures"]) - 1, True), (0, False)):
        before = [[int(Kind.OPERATOR), hook, 1, 0, 0], [int(Kind.WAIT_STREAM), 2, 1]]
        data["events"] = [*events[:at], *before, *events[at:]]
        found = [one for one in captured_script(capture_of(data, "x")).step if isinstance(one, Communicate)]
        assert found[0].hooked is hooked


def test_what_the_host_does_beside_launches_is_spread_over_them_and_priced() -> None:
    """Two kernels forward and one backward; a phase without kernels has nobody to wait for it."""
    counts = {"forward": [10, 0, 4, 2, 6], "backward": [3, 5, 0, 0, 0], "optimizer": [7, 0, 0, 0, 0]}
    data = capture()
    plain = captured_script(capture_of(data, "x")).step
    found = [one for one in captured_script(capture_of({**data, "host": counts}, "x")).step if isinstance(one, Launch)]
    assert [one.handled for one in found] == [(5.0, 0.0, 2.0, 1.0, 3.0)] * 2 + [(3.0, 5.0, 0.0, 0.0, 0.0)]
    assert not any(one.handled for one in plain if isinstance(one, Launch))
    host = {"view_s": 1e-6, "node_s": 2e-6, "dispatch_s": 10e-6, "wrap_s": 20e-6, "layout_s": 100e-6}
    stack = Stack.load("torch-2.11-eager")
    stack = stack.model_copy(update={"host": stack.host.model_copy(update=host)})
    device = Cluster.load("hgx-h100-8", 1).device
    clock = Clock(device, Calibration.for_device(device), stack)
    assert clock.handled_s(found[0].handled) == pytest.approx(5e-6 + 20e-6 + 20e-6 + 300e-6)
    assert clock.handled_s(found[2].handled) == pytest.approx(3e-6 + 10e-6)
    assert clock.handled_s(()) == 0.0


def test_a_step_that_waits_for_its_host_waits_for_what_launches_nothing_too() -> None:
    cluster = Cluster.load("hgx-h100-8", 1)
    steps = [
        predict_program(capture_of({**capture(), "host": {"forward": [count, 0, 0, 0, 0]}}, "x"), cluster).step_s
        for count in (0, 100_000, 200_000)
    ]
    view_s = Stack.load("torch-2.11-eager").host.view_s
    assert steps[2] - steps[1] == pytest.approx(100_000 * view_s, rel=1e-3)
    assert steps[0] < steps[1]


@pytest.mark.parametrize(
    "host", [[], {"sideways": [0] * 5}, {"forward": [1]}, {"forward": [0, 0, 0, 0, -1]}, {"backward": "a"}]
)
def test_counts_of_the_host_that_are_none(host: Any) -> None:
    with pytest.raises(InputError, match=r"x: rank 0: host\."):
        capture_of({**capture(), "host": host}, "x")


def test_a_capture_is_predicted_and_its_storages_are_live_bytes() -> None:
    one = capture_of(capture(), "by hand")
    found = predict_program(one, Cluster.load("hgx-h100-8"))
    assert found.lower_s <= found.step_s <= found.upper_s
    assert found.low_s < found.step_s < found.high_s
    assert sum(found.breakdown.values()) == pytest.approx(found.step_s)
    script = captured_script(one)
    live = step_live_bytes(script_history(script.step, script.before, script.categories))
    assert live.peak[0] == (1 << 20) + GATHER
    assert live.resident == 1 << 20


def test_a_workspace_is_taken_by_a_thread_s_first_product() -> None:
    """cuBLAS asks the allocator for it then: a large block that is free is cut, and serves what is as large no more."""
    large, (workspace, _) = 1 << 30, workspace_bytes(Device.load("h100-sxm5-80gb"))
    until = [
        [Kind.ALLOCATE, 5, large, 0], [Kind.OPERATOR, 0, 0, 0, Phase.FORWARD], [Kind.FREE, 5],
        [Kind.OPERATOR, 0, 0, 0, Phase.BACKWARD],
    ]  # fmt: skip
    step = [[Kind.ALLOCATE, 6, large, 0], [Kind.OPERATOR, 0, 0, 0, 0], [Kind.FREE, 6], [Kind.STEP, 3]]
    without = [event for event in until if event[0] != Kind.OPERATOR]
    cluster = Cluster.load("hgx-h100-8")
    taken, early = (
        predict_program(capture_of(capture(events=before + step, steady=len(before)), "by hand"), cluster).memory
        for before in (until, without)
    )
    assert taken.peak_allocated_bytes == early.peak_allocated_bytes
    assert early.peak_reserved_bytes == large + 2 * workspace
    assert taken.peak_reserved_bytes == 2 * large + workspace


def test_an_interval_never_starts_below_the_data_sheet() -> None:
    """Two large products without any loss: their interval would reach below what the device can do."""
    large = json.loads(json.dumps(MM).replace("512", "8192"))
    cluster = Cluster.load("hgx-h100-8")
    one = capture_of(capture(signatures=[large, COPY]), "by hand")
    found = predict_program(one, cluster, Calibration.ideal())
    floor_s = 2 * 2 * 8192**3 / cluster.device.peak("bf16")
    assert found.step_s**2 / found.high_s < floor_s
    assert found.low_s == pytest.approx(floor_s)


def test_a_device_without_the_programs_precision_has_a_peak_all_the_same() -> None:
    """V100 has no bf16: its fp16 program is measured by its fp16 peak."""
    half = json.loads(json.dumps(MM).replace("bf16", "fp16"))
    cluster = Cluster.load("dgx1-v100-8")
    found = predict_program(capture_of(capture(signatures=[half, COPY]), "by hand"), cluster)
    assert found.peak_flop_per_s == cluster.device.peak("fp16") > 0
    assert found.hfu > 0


def test_groups_of_a_mesh_are_lattices() -> None:
    """2 × 4 ranks of every eighth pair: 0, 1, 16, 17, …"""
    ranks = [16 * far + near for far in range(4) for near in range(2)]
    one = capture_of(capture(groups=[ranks], world_size=64), "by hand")
    (gather,) = (each for each in captured_script(one).step if isinstance(each, Communicate))
    assert gather.role == "@2:1,4:16"


def test_unknown_operators_widen_the_interval() -> None:
    known = predict_program(capture_of(capture(), "by hand"), Cluster.load("hgx-h100-8"))
    magic = ["mylib.magic.default", [[tensor(1 << 24)], []], tensor(1 << 24)]
    unknown = predict_program(capture_of(capture(signatures=[magic, COPY]), "by hand"), Cluster.load("hgx-h100-8"))
    assert unknown.step_s / unknown.low_s > known.step_s / known.low_s
    assert any("mylib.magic" in source.detail for source in unknown.sources)


def test_a_program_is_served_by_the_pool_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole blocks: storages of some KiB take one block of 2 MiB, at the calibration's price of a call with so many bytes."""
    one, cluster = capture_of(data(3), "by hand"), Cluster.load("hgx-h100-8")
    usual = predict_program(one, cluster)
    fixed = predict_program(one, cluster, memory=MemoryPlan(policy="fixed"))
    pool = fixed.memory.pool
    assert usual.memory.pool is None
    assert pool is not None
    made = sum(event[0] == Kind.ALLOCATE for event in data(3)["ranks"][0]["events"])
    assert pool.allocations == made
    assert pool.calls == {"segment_alloc": 1}
    malloc = DriverCosts.of(Calibration.for_device(cluster.device)).malloc
    assert fixed.step_s - usual.step_s == pytest.approx(malloc.seconds(1, BLOCK_BYTES))
    halved = predict_program(one, cluster, memory=MemoryPlan(compress={"activations": 2.0})).memory
    assert halved.by_category["activations"] < usual.memory.by_category["activations"]
    own = predict_program(one, cluster, memory=MemoryPlan(alloc_s=1e-3))
    assert 0 < own.breakdown[OWN_ALLOCATOR] <= made * 1e-3
    path = tmp_path / "one.capture.gz"
    write_capture(path, data(3))
    words = ["predict", "--program", str(path)]
    assert main([*words, "--memory-policy", "fixed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["pool"]["calls"] == pool.calls
    assert main([*words, "--set", "plan.memory.policy=tiered"]) == 3
    assert "one of caching, expandable" in capsys.readouterr().err
    assert main([*words, "--memory-policy", "arena", "--alloc-conf", "expandable_segments:True", "--tp", "2"]) == 3
    assert "--tp" in capsys.readouterr().err


def test_a_file_reads_back_and_is_the_same_each_time(tmp_path: Path) -> None:
    path = tmp_path / "one.capture.gz"
    write_capture(path, capture())
    first = path.read_bytes()
    write_capture(path, capture())
    assert path.read_bytes() == first
    assert read_capture(path) == capture_of(capture(), str(path))
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": "other"}, "no capture"),
        ({"version": 3}, "version 3 of captures"),
        ({"names": 3}, "names: is no list"),
        ({"signatures": [["mm", [], []]]}, "signatures.0: no [namespace.operator"),
        ({"signatures": [["aten.mm.default", []], 3]}, "signatures.1: no [namespace.operator"),
        ({"events": [[99, 1]]}, "is no event"),
        ({"events": [[Kind.OPERATOR, 5, 0, 0, 0]]}, "is no event"),
        ({"events": [[Kind.FREE]]}, "is no event"),
        ({"events": ["x"]}, "is no event"),
        ({"events": [[Kind.FREE, 5]]}, "is no event"),  # what never began
        ({"events": [[Kind.ALLOCATE, 5, 512, 0], [Kind.ALLOCATE, 5, 512, 0]]}, "is no event"),
    ],
)
def test_files_that_are_no_captures(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem.replace("[", r"\[")):
        capture_of(capture(**changes), "file")


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "short.capture.gz"
    path.write_bytes(gzip.compress(json.dumps(capture()).encode())[:-20])
    with pytest.raises(InputError, match="no capture"):
        read_capture(path)
