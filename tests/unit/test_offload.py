from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.base.errors import ClusterError, PlanError
from simulator.base.fit import Fit
from simulator.formats.study import read_study
from simulator.memory import activation_bytes, simulate_memory, write_history
from simulator.memory.tape import FREE
from simulator.parallel.legality import check
from simulator.parallel.mesh import Mesh
from simulator.play.engine import run
from simulator.play.lower import Lowering, lower
from simulator.predict.tiers import with_lower_tiers
from simulator.predict.verdict import cause_of
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Offload, Plan
from simulator.spec.software.stack import Stack
from simulator.work.checkpoint import Checkpoint, saving
from simulator.work.collectives import collective_s
from simulator.work.offload import tier_usage
from simulator.work.ops import build_blocks
from simulator.work.script import units
from simulator.work.trace import Timeline

MODEL = Model(
    name="small",
    family="llama",
    num_layers=6,
    d_model=1024,
    num_heads=8,
    num_kv_heads=8,
    d_ff=2816,
    mlp="swiglu",
    norm="rms",
    positions="rope",
    vocab_size=4096,
)
STACK = Stack.load("torch-2.6-eager")
STATES = {"optimizer": "host", "parameters": "host"}


def node(gpus: int, **tier: object) -> Cluster:
    preset = Cluster.load("hgx-h100-8")
    data = {field: getattr(preset, field) for field in Cluster.model_fields}
    given = {"tier": tier} if tier else {}
    return Cluster.parse({**data, "gpus_per_node": gpus, "nvlink_domain_size": gpus, **given}, "test", ClusterError)


def lowered(plan: Plan, **tier: object) -> Lowering:
    place = node(plan.num_devices, **tier)
    return lower(MODEL, plan, place, STACK, Calibration.datasheet(place.device), default_curves())


def played(plan: Plan, **tier: object) -> Timeline:
    return run([lowered(plan, **tier).program(plan.num_micro_batches)])


def offloading(**given: object) -> Offload:
    return Offload.model_validate(given)


def span_of(timeline: Timeline, label: str) -> tuple[float, float]:
    (found,) = [span for span in timeline.of() if span.label == label]
    return float(found.start_s), float(found.end_s)


def plan(**given: object) -> Plan:
    return Plan.model_validate({"dp_shard": 4, "seq_len": 2048, **given})


def test_activations_come_back_before_their_backward_and_ahead_of_it() -> None:
    timeline = played(plan(offload=offloading(activations="host", prefetch=1)))
    for layer in range(5):
        restored = span_of(timeline, f"restore layer{layer} mb0")
        assert restored[1] <= span_of(timeline, f"backward layer{layer} mb0")[0]
    # one block ahead: layer 2 comes while layer 3 computes, not before layer 4 is done
    assert span_of(timeline, "restore layer2 mb0")[0] >= span_of(timeline, "backward layer4 mb0")[1]
    assert span_of(timeline, "restore layer2 mb0")[0] < span_of(timeline, "backward layer3 mb0")[1]


def test_looking_ahead_hides_transfers_that_demand_exposes() -> None:
    busy = plan(recompute="full", micro_batch_size=4)  # more work than the host takes to launch it
    demand = played(busy.copy_with(offload=offloading(activations="host", prefetch=0)))
    ahead = played(busy.copy_with(offload=offloading(activations="host", prefetch=2)))
    assert float(demand.exposed("h2d")) > 10 * float(ahead.exposed("h2d"))
    assert ahead.step_s < demand.step_s


def test_a_third_block_waits_until_the_first_ones_activations_have_left() -> None:
    timeline = played(plan(offload=offloading(activations="host")), d2h_bytes_per_s=1e9)
    for layer in range(3):
        assert span_of(timeline, f"forward layer{layer + 2} mb0")[0] >= span_of(timeline, f"evict layer{layer} mb0")[1]


def test_gradients_leave_under_the_backward_of_the_blocks_before() -> None:
    timeline = played(plan(offload=offloading(**STATES)))
    sent = span_of(timeline, "gradient layer5 mb0")
    assert span_of(timeline, "reduce-scatter layer5 mb0")[1] <= sent[0]
    assert sent[0] < span_of(timeline, "backward layer0 mb0")[0]
    assert span_of(timeline, "update 0")[0] >= span_of(timeline, "gradient embedding mb0")[1]


def test_parameters_are_fetched_before_they_are_gathered() -> None:
    timeline = played(plan(offload=offloading(**STATES)))
    for name in ("layer3 mb0", "layer3 mb0 backward"):
        assert span_of(timeline, f"fetch {name}")[1] <= span_of(timeline, f"all-gather {name}")[0]


@pytest.mark.parametrize("given", [{"pinned": False}, {"migration": "fault"}])
def test_nothing_runs_beside_staged_copies_and_faults(given: dict[str, object]) -> None:
    timeline = played(plan(offload=offloading(activations="host", **given)))
    # what the copies of a forward wait for, and what waits for them, alternate
    for layer in range(4):
        assert span_of(timeline, f"evict layer{layer} mb0")[1] <= span_of(timeline, f"forward layer{layer + 1} mb0")[0]


def test_unified_memory_prefetched_is_a_copy_and_faulting_is_slower() -> None:
    copied, prefetched, faulting = (
        played(plan(offload=offloading(activations="host", migration=how))).step_s
        for how in ("copy", "prefetch", "fault")
    )
    assert copied == prefetched < faulting


def lending(gpus: int, idle: int) -> Cluster:
    return node(gpus).model_copy(update={"idle_gpus": idle})


def lent(offload: Offload, idle: int) -> Lowering:
    place = lending(4, idle)
    asked = plan(offload=offload)
    return lower(MODEL, asked, place, STACK, Calibration.datasheet(place.device), default_curves())


def test_a_peer_takes_activations_over_nvlink_instead_of_the_host() -> None:
    """As many bytes go, on the port that collectives use, and are in the lenders' memory instead of the host's."""
    to_host = lowered(plan(offload=offloading(activations="host")))
    to_peer = lent(offloading(activations="peer"), 4)
    moved = {}
    for name, lowering, out in (("host", to_host, "d2h"), ("peer", to_peer, "to_peer")):
        timeline = run([lowering.program(1)])
        spent = [s for s in timeline.spans if s.stream == out]
        moved[name] = sum(float(s.end_s - s.start_s) for s in spent)
    assert moved["peer"] < moved["host"] / 3  # 450 against some 55 GB/s
    use, _ = simulate_memory(MODEL, to_peer.plan, STACK, to_peer.blocks, to_peer.device)
    below = with_lower_tiers(use, to_peer)
    assert below.host_bytes == 0
    assert below.peer_bytes == with_lower_tiers(use, to_host).host_bytes
    assert below.peer_capacity_bytes == 4 * to_peer.device.usable_bytes
    assert replace(below, peer_bytes=10**13).fit is Fit.DOES_NOT_FIT


def test_a_lender_shared_by_ranks_is_slower() -> None:
    slow, fast = (run([lent(offloading(activations="peer"), idle).program(1)]) for idle in (1, 4))
    assert slow.step_s >= fast.step_s
    spent = [sum(float(s.end_s - s.start_s) for s in t.spans if s.stream == "from_peer") for t in (slow, fast)]
    assert spent[0] > 2 * spent[1]


def test_a_peer_needs_idle_gpus_on_nvlink() -> None:
    with pytest.raises(PlanError, match="idle"):
        lent(offloading(activations="peer"), 0)


def test_states_on_nvme_are_read_and_written_beside_the_update() -> None:
    given = {"optimizer": "nvme", "parameters": "nvme", "sub_group_numel": 4_000_000}
    asked = plan(data_parallel="deepspeed", offload=offloading(**given))
    beside = played(asked)
    assert span_of(beside, "read states 1")[0] < span_of(beside, "update 0")[1]
    # three sets of buffers: the fourth round reads once the first has written
    assert span_of(beside, "read states 3")[0] >= span_of(beside, "write states 0")[1]
    turns = played(asked.copy_with(offload=offloading(**given, overlap=False)))
    assert span_of(turns, "read states 1")[0] >= span_of(turns, "write states 0")[1]
    assert beside.step_s < turns.step_s


def test_both_directions_together_share_the_link() -> None:
    tier = node(1).host_tier
    assert tier is not None
    costs = lowered(plan(dp_shard=1, offload=offloading(**STATES))).program(1)
    assert costs.links["host:both"] == tier.both_bytes_per_s < tier.h2d_bytes_per_s + tier.d2h_bytes_per_s


def test_micro_batches_add_their_gradients_where_the_implementation_does() -> None:
    def kinds(asked: Plan) -> set[str]:
        return {span.label.rsplit(" ", 2)[0] for span in played(asked).of() if "gradient" in span.label}

    accumulated = {"num_micro_batches": 2}
    assert kinds(plan(**accumulated, offload=offloading(**STATES))) == {"gradient", "add gradient"}
    deepspeed = {"data_parallel": "deepspeed", "zero": 2, "offload": offloading(optimizer="host")}
    assert kinds(plan(**accumulated, **deepspeed)) == {"gradient", "fetch gradient"}
    assert kinds(plan(**deepspeed)) == {"gradient"}


def test_a_delayed_update_runs_beside_the_step_and_sends_after_it() -> None:
    """ZeRO-Offload's one-step delay: CPU Adam starts with the step; new parameters wait for the last backward."""
    given = {"data_parallel": "deepspeed", "zero": 2}
    usual = played(plan(**given, offload=offloading(optimizer="host")))
    delayed = played(plan(**given, offload=offloading(optimizer="host", delayed=True)))
    assert span_of(delayed, "update 0")[0] < span_of(delayed, "forward layer1 mb0")[0]
    assert span_of(delayed, "send parameters 0")[0] >= span_of(delayed, "backward embedding mb0")[1]
    assert delayed.step_s < usual.step_s
    once, twice = (
        tier_usage(MODEL, plan(**given, offload=offloading(optimizer="host", delayed=d))).host["gradients"]
        for d in (False, True)
    )
    assert twice == 2 * once


def test_the_bytes_that_leave_are_the_bytes_that_are_freed() -> None:
    """What the schedule moves and what the events free are two computations of the same tensors."""

    def freed_layers(asked: Plan) -> int:
        history = write_history(MODEL, asked, STACK, build_blocks(MODEL, STACK, asked), ())
        size: dict[int, int] = {}
        alive: set[int] = set()
        again = 0
        for slot, num_bytes, _, _ in history.events[history.steady :]:
            if num_bytes >= 0:
                again += num_bytes if slot in size and slot not in alive else 0
                size[slot] = num_bytes
                alive.add(slot)
            elif num_bytes == FREE:
                alive.discard(slot)
        return again

    for recompute in ("none", "selective", "full"):
        asked = plan(recompute=recompute, offload=offloading(activations="host"))
        moved = activation_bytes(MODEL, asked, STACK, build_blocks(MODEL, STACK, asked))
        assert freed_layers(asked) == sum(moved.values()) > 0


@pytest.mark.parametrize(
    ("given", "offload", "remedy"),
    [
        ({}, {"optimizer": "host"}, 'parameters = "host"'),
        ({}, {"optimizer": "nvme", "parameters": "nvme"}, 'parameters = "host"'),
        ({"data_parallel": "deepspeed", "zero": 2}, {"optimizer": "nvme"}, "zero = 3"),
        ({"data_parallel": "deepspeed", "zero": 2}, {"optimizer": "host", "parameters": "host"}, "zero = 3"),
        ({"data_parallel": "fsdp1"}, {"optimizer": "host"}, 'parameters = "host"'),
        ({"data_parallel": "megatron", "zero": 1}, {"optimizer": "host"}, "deepspeed"),
        ({"optimizer": "sgd"}, STATES, "adamw"),
        ({}, {**STATES, "delayed": True}, "delayed = false"),
        ({"data_parallel": "deepspeed"}, {"delayed": True}, "delayed = false"),
    ],
)
def test_what_no_implementation_offloads_is_refused(
    given: dict[str, object], offload: dict[str, object], remedy: str
) -> None:
    with pytest.raises(PlanError) as caught:
        check(plan(**given, offload=offload))
    assert any(remedy in (fault.remedy or "") for fault in caught.value.faults)


def test_a_host_that_is_too_small_is_a_verdict() -> None:
    asked = plan()
    use, _ = simulate_memory(MODEL, asked, STACK, build_blocks(MODEL, STACK, asked), node(4).device)
    assert use.fit is Fit.FITS
    full = replace(use, host_bytes=2 * 10**12, host_capacity_bytes=10**12)
    assert full.fit is Fit.DOES_NOT_FIT
    assert "host memory" in cause_of(full)
    drives = replace(use, nvme_bytes=2 * 10**12, nvme_capacity_bytes=10**12)
    assert "NVMe" in cause_of(drives)


def test_a_hypervisor_and_a_fraction_take_of_the_device() -> None:
    device = node(4).device
    blocks = build_blocks(MODEL, STACK, plan())

    def capacity(asked: Plan, reserved: int) -> tuple[int, int]:
        smaller = device.model_copy(update={"hypervisor_bytes": reserved})
        use, _ = simulate_memory(MODEL, asked, STACK, blocks, smaller)
        return use.capacity_bytes, use.outside_torch_bytes

    whole, _ = capacity(plan(), 0)
    left, _ = capacity(plan(), 10**10)
    assert left == whole - 10**10
    limited, outside = capacity(plan(memory_fraction=0.5), 10**10)
    assert limited == left // 2 + outside


def test_a_sharded_checkpoint_is_every_ranks_share() -> None:
    place, size = node(4), 12 * MODEL.num_parameters
    tier = place.host_tier
    assert tier is not None
    saved = saving(MODEL, plan(), place, Checkpoint())
    share = -(-size // 4)
    assert (saved.state_bytes, saved.host_bytes, saved.extra_hbm_bytes) == (size, 4 * share, 0)
    assert saved.copy_s == pytest.approx(share / tier.d2h_bytes_per_s)
    assert saved.write_s == pytest.approx(4 * share / (4 * tier.process_write_bytes_per_s))
    assert saved.gather_s == 0
    later = saving(MODEL, plan(), place, Checkpoint(asynchronous=True))
    assert later.blocking_s == pytest.approx(saved.copy_s)


def test_a_gathered_checkpoint_is_one_processes_work() -> None:
    place, asked = node(4), plan()
    tier = place.host_tier
    assert tier is not None
    saved = saving(MODEL, asked, place, Checkpoint(mode="gather"))
    shape = Mesh(asked, place).group_shape("dp_shard_cp")
    sizes = [unit.padded_numel for unit in units(MODEL, asked)]
    alone = sum(
        float(collective_s("all_gather", numel * width, shape, place, None)) for numel in sizes for width in (4, 8)
    )
    assert saved.gather_s == pytest.approx(alone)
    assert saved.extra_hbm_bytes == 4 * max(sizes)
    assert saved.write_s == pytest.approx(12 * MODEL.num_parameters / tier.process_write_bytes_per_s)
    assert saved.total_s > saving(MODEL, asked, place, Checkpoint()).total_s


def test_offloaded_states_need_no_copy_to_be_saved() -> None:
    saved = saving(MODEL, plan(offload=offloading(**STATES)), node(4), Checkpoint())
    assert saved.copy_s == 0


def test_replicated_states_need_no_gather() -> None:
    saved = saving(MODEL, Plan(zero=0, dp_replicate=4), node(4), Checkpoint(mode="gather"))
    assert (saved.gather_s, saved.extra_hbm_bytes) == (0, 0)


def test_flags_reach_into_offload_and_checkpoint() -> None:
    settings = ["plan.offload.optimizer=host", "plan.offload.parameters=host", "checkpoint.mode=gather"]
    asked = read_study(None, {}, {}, settings)
    assert (asked.plan.offload.optimizer, asked.plan.offload.parameters) == ("host", "host")
    assert asked.checkpoint == Checkpoint(mode="gather")
    assert read_study(None, {}, {}, []).checkpoint is None
