"""Tensors that another stream has read: what the allocator cannot reuse while the host is ahead of the device."""

import pytest

from simulator.memory import simulate_memory
from simulator.memory.allocator import CachingAllocator
from simulator.memory.history import History, step_reserved_bytes, write_history
from simulator.memory.step import StepWriter
from simulator.memory.tape import FREE_LATER, RECORDED, TAG
from simulator.memory.tapes import record_tapes
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


def lowering(stack: Stack = STACK, cluster: Cluster = H100, **changes: object) -> Lowering:
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
    return lower(MODEL, plan, cluster, stack, CALIBRATION, default_curves())


def _with_layer_s(layer_s: float) -> Stack:
    return STACK.model_copy(update={"host": STACK.host.model_copy(update={"layer_s": layer_s})})


def test_a_fast_host_is_ahead_by_what_the_queue_holds_and_a_slow_one_by_nothing() -> None:
    assert 1024 // 40 <= passes_ahead(lowering(num_micro_batches=16)) <= 1024 // 20  # 24 launches forward
    assert passes_ahead(lowering(_with_layer_s(0.1))) == 0
    assert passes_ahead(lowering(tp=1, dp_replicate=8)) == 0


def test_a_step_begins_without_a_lead() -> None:
    """One micro-batch: of a forward's ten passes the device has run the part that it takes host time for."""
    one = lowering()
    host_s, device_s = _paces(one, one.step.units[1].work)
    assert host_s < 0.5 * device_s
    assert (1 - 1.2 * host_s / device_s) * 10 < passes_ahead(one) < 10


def test_hosts_that_do_not_wait_for_each_other_drift_apart() -> None:
    """Where all are slower than the device, the slowest sets its pace: others fill the queue in the end, unless each call waits for all."""
    slow = _with_layer_s(0.1)
    leads = [passes_ahead(lowering(slow, num_micro_batches=count)) for count in (1, 8, 64, 512)]
    assert leads == sorted(leads)
    assert leads[-1] == passes_ahead(lowering(_with_layer_s(1e-4), num_micro_batches=512))
    waits = H100.model_copy(update={"fabric": H100.fabric.model_copy(update={"call_rank_s": 3e-4})})
    assert passes_ahead(lowering(slow, waits, num_micro_batches=512)) == 0


def test_the_lead_falls_step_by_step_as_the_host_slows_down_to_the_devices_pace() -> None:
    """Half of the queue where both take equally long: of hosts that are known to a factor, half are faster."""
    leads = []
    for layer_s in (1e-4, 4e-3, 8e-3, 1e-2, 1.2e-2, 1.6e-2, 2e-2, 1e-1):
        one = lowering(_with_layer_s(layer_s), tp=4, pp=2, num_micro_batches=64)
        host_s, device_s = _paces(one, one.step.units[1].work)
        leads.append((device_s / host_s, passes_ahead(one)))
    most = leads[0][1]
    assert [lead for _, lead in leads] == sorted((lead for _, lead in leads), reverse=True)
    assert all(lead > most / 2 if ratio > 1.1 else lead < most / 2 for ratio, lead in leads if not 0.9 < ratio < 1.1)
    assert len({lead for _, lead in leads} - {0, most}) >= 3


def test_stages_that_send_in_turn_fill_the_pipeline_ahead_of_the_device() -> None:
    slow = _with_layer_s(0.1)
    for stages, passes in ((2, 0), (4, 2 * (1 + 2))):  # the embedding and two layers
        assert passes_ahead(lowering(slow, tp=2, pp=stages, dp_replicate=4 // stages, num_micro_batches=8, pipeline={"stage_layers": (8 // stages,) * stages})) == passes  # fmt: skip


def test_what_waits_is_reserved_and_not_alive() -> None:
    """One micro-batch: at the end of its forward all of its layers' partial sums wait, two of whole tokens a layer, and what came of them."""
    one = lowering()
    inputs = (one.model, one.plan, one.stack, one.blocks, one.device)
    (alone, _), (ahead, _) = (simulate_memory(*inputs, lead=lead) for lead in (0, 16))
    sums = 2 * MODEL.num_layers * (8 + 1) * 4096 * MODEL.d_model * 2
    assert ahead.peak_allocated_bytes == alone.peak_allocated_bytes
    assert 0.6 * sums <= ahead.peak_reserved_bytes - alone.peak_reserved_bytes <= 1.1 * sums
    assert alone.peak_reserved_bytes < memory_of(one).memory.peak_reserved_bytes < ahead.peak_reserved_bytes


def test_what_a_collective_reads_and_what_it_writes_wait_for_it() -> None:
    """Partial sums and what comes of their reduce-scatters; backward, what is gathered again, too. A part is an eighth of the tokens."""
    one = lowering()
    tape = next(iter(record_tapes(one.blocks, one.plan, one.stack, keep_gradients=False).plain.values()))
    whole = 8 * 4096 * MODEL.d_model * 2
    sizes = {slot: size for part in (tape.forward, tape.backward) for slot, size, _, _ in part.events if size >= 0}
    for part, parts in ((tape.forward, 2), (tape.backward, 4)):
        late = sorted(sizes[slot] for slot, size, event, _ in part.events if (size, event) == (FREE_LATER, RECORDED))
        assert late == [whole // 8] * parts + [whole] * 2


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
        )
        step.writer.lead = 40
        step.persistent((), optimizer_state=True)
        for _ in range(steps):
            step.read(step.script(2), 2)
        writer = step.writer
        history = History(events=writer.events, marks=writer.marks, num_slots=writer.num_slots, steady=0)
        reserved.append(max(step_reserved_bytes(history, CachingAllocator())))
    assert reserved[0] == reserved[1]


def test_moments_are_made_in_the_first_step_where_earlier_activations_lay() -> None:
    """nanotron's AdamW and Megatron's make theirs lazily, DeepSpeed's engine when it is built; the fp32 copies are there from the start."""
    for name, copies in (("nanotron", 4), ("megatron", 4), ("deepspeed", 12)):
        one = lowering(
            Stack.load("torch-2.6-eager"), tp=1, dp_shard=8, zero=1, data_parallel=name, sequence_parallel=False
        )
        history = write_history(one.model, one.plan, one.stack, one.blocks, ())
        states = [size for _, size, _, tag in history.events[: history.marks[1][0]] if tag == TAG["optimizer_state"]]
        assert sum(states) == pytest.approx(copies * one.model.num_parameters / 8, rel=0.001)
