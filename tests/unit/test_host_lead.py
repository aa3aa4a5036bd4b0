"""Tensors that another stream has read: what the allocator cannot reuse while the host is ahead of the device."""

from simulator.memory import simulate_memory
from simulator.memory.allocator import CachingAllocator
from simulator.memory.history import History, step_reserved_bytes
from simulator.memory.step import StepWriter
from simulator.parallel.model_shard import shard_of
from simulator.play.lower import Lowering, lower
from simulator.play.lower.host_lead import _paces, passes_ahead
from simulator.predict import memory_of
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.collectives import default_curves
from simulator.work.script import implementation_of

H100 = Cluster.load("hgx-h100-8")
STACK = Stack.load("nanotron-2025")
MODEL = Model.load("llama3-8b").model_copy(update={"num_layers": 8})
CALIBRATION = Calibration.for_device(H100.device)


def lowering(stack: Stack = STACK, **changes: object) -> Lowering:
    values: dict[str, object] = {
        "tp": 8,
        "micro_batch_size": 8,
        "seq_len": 4096,
        "stack": stack.name,
        "data_parallel": "nanotron",
        "sequence_parallel": True,
        "zero": 0,
    }
    plan = Plan.model_validate({**values, **changes})
    return lower(MODEL, plan, H100, stack, CALIBRATION, default_curves())


def test_a_fast_host_is_ahead_by_what_the_queue_holds_and_a_slow_one_by_nothing() -> None:
    assert 1024 // 40 <= passes_ahead(lowering()) <= 1024 // 20  # 24 launches forward
    slow = STACK.model_copy(update={"host": STACK.host.model_copy(update={"layer_s": 0.1})})
    assert passes_ahead(lowering(slow)) == 0
    assert passes_ahead(lowering(tp=1, dp_replicate=8)) == 0


def test_the_lead_falls_step_by_step_as_the_host_slows_down_to_the_devices_pace() -> None:
    """Half of the queue where both take equally long: of hosts that are known to a factor, half are faster."""
    leads = []
    for layer_s in (1e-4, 1e-3, 2e-3, 3e-3, 4e-3, 6e-3, 1e-2, 1e-1):
        one = lowering(STACK.model_copy(update={"host": STACK.host.model_copy(update={"layer_s": layer_s})}))
        host_s, device_s = _paces(one, one.step.units[1].work)
        leads.append((device_s / host_s, passes_ahead(one)))
    most = leads[0][1]
    assert [lead for _, lead in leads] == sorted((lead for _, lead in leads), reverse=True)
    assert all(lead > most / 2 if ratio > 1.1 else lead < most / 2 for ratio, lead in leads if not 0.9 < ratio < 1.1)
    assert len({lead for _, lead in leads} - {0, most}) >= 3


def test_stages_that_send_in_turn_fill_the_pipeline_ahead_of_the_device() -> None:
    slow = STACK.model_copy(update={"host": STACK.host.model_copy(update={"layer_s": 0.1})})
    for stages, passes in ((2, 0), (4, 2 * (1 + 2))):  # the embedding and two layers
        assert passes_ahead(lowering(slow, tp=2, pp=stages, dp_replicate=4 // stages, num_micro_batches=8, pipeline={"stage_layers": (8 // stages,) * stages})) == passes  # fmt: skip


def test_what_waits_is_reserved_and_not_alive() -> None:
    """One micro-batch: at the end of its forward, all of its layers' partial sums wait, two a layer of whole tokens."""
    one = lowering()
    inputs = (one.model, one.plan, one.stack, one.blocks, one.device)
    (alone, _), (ahead, _) = (simulate_memory(*inputs, lead=lead) for lead in (0, 16))
    sums = 2 * MODEL.num_layers * 8 * 4096 * MODEL.d_model * 2
    assert ahead.peak_allocated_bytes == alone.peak_allocated_bytes
    assert 0.6 * sums <= ahead.peak_reserved_bytes - alone.peak_reserved_bytes <= 1.1 * sums
    assert memory_of(one).memory.peak_reserved_bytes >= ahead.peak_reserved_bytes


def test_nothing_waits_for_ever() -> None:
    """A third step finds all that the second one reserved."""
    one = lowering()
    reserved = []
    for steps in (1, 2):
        step = StepWriter(
            shard_of(one.model, one.plan),
            one.plan,
            one.stack,
            one.blocks,
            implementation_of(one.plan).buffers(one.plan, "nccl"),
            lead=40,
        )
        step.persistent((), optimizer_state=True)
        for _ in range(steps):
            step.read(step.script(2), 2)
        writer = step.writer
        history = History(events=writer.events, marks=writer.marks, num_slots=writer.num_slots, steady=0)
        reserved.append(max(step_reserved_bytes(history, CachingAllocator())))
    assert reserved[0] == reserved[1]
