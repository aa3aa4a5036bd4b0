from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from simulator.memory import simulate_memory, step_live_bytes, step_reserved_bytes, write_history
from simulator.memory.allocator import AllocatorSettings, Block, CachingAllocator, OutOfMemoryError
from simulator.spec.cluster.device import Device, PeakFlop
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.records import Kernels
from simulator.spec.software.stack import AttentionBackend, Stack
from simulator.work.ops import build_blocks
from simulator.work.script import resident_bytes
from tests.examples import examples

MIB = 2**20
GPU = Device(
    name="gpu",
    architecture="ampere",
    memory_bytes=80 * 2**30,
    memory_bytes_per_s=2e12,
    peak_flop_per_s=PeakFlop(fp32=2e13, bf16=3e14),
    num_sms=108,
    power_w=400,
)

# What a program may do: ask (bytes, stream), free the n-th live block, let other streams read it, wait, empty the cache.
REQUESTS = st.one_of(
    st.tuples(st.just("malloc"), st.integers(1, 64 * MIB), st.integers(0, 2)),
    st.tuples(st.just("malloc"), st.integers(1, 4096), st.integers(0, 2)),
    st.tuples(st.just("free"), st.integers(0, 100), st.just(0)),
    st.tuples(st.just("free_later"), st.integers(0, 100), st.integers(0, 2)),
    st.tuples(st.just("synchronize"), st.just(0), st.integers(0, 2)),
    st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
)
SETTINGS = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([2**62, 32 * MIB]),
    roundup_power2_divisions=st.sampled_from([(), (8,) * 16]),
)


def play(allocator: CachingAllocator, requests: list[tuple[str, int, int]]) -> list[Block]:
    live: list[Block] = []
    for kind, number, stream in requests:
        if kind == "malloc":
            live.append(allocator.malloc(number, stream))
        elif kind in ("free", "free_later") and live:
            block = live.pop(number % len(live))
            if kind == "free_later":
                allocator.record_stream(block, stream)
            allocator.free(block)
        elif kind == "synchronize":
            allocator.synchronize(stream)
        elif kind == "empty_cache":
            allocator.empty_cache()
        check(allocator, live)
    return live


def check(allocator: CachingAllocator, live: list[Block]) -> None:
    assert allocator.requested_bytes == sum(block.requested for block in live)
    assert allocator.allocated_bytes == sum(block.size for block in live)
    assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.active_bytes <= allocator.reserved_bytes
    assert all(block.requested <= block.size for block in live)


@given(SETTINGS, st.lists(REQUESTS, max_size=60))
@examples(150)
def test_reserved_holds_active_holds_allocated_at_every_event(
    options: AllocatorSettings, requests: list[tuple[str, int, int]]
) -> None:
    allocator = CachingAllocator(options)
    play(allocator, requests)
    blocks = list(allocator.blocks())
    assert sum(block.size for block in blocks) == allocator.reserved_bytes
    ends = sorted((block.address, block.address + block.size) for block in blocks)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


@given(SETTINGS, st.lists(REQUESTS, max_size=60))
@examples(100)
def test_freeing_everything_makes_every_segment_one_free_block(
    options: AllocatorSettings, requests: list[tuple[str, int, int]]
) -> None:
    allocator = CachingAllocator(options)
    for block in play(allocator, requests):
        allocator.free(block)
    allocator.synchronize()
    assert allocator.allocated_bytes == allocator.active_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


@given(SETTINGS, st.lists(REQUESTS, max_size=60))
@examples(30)
def test_the_same_requests_give_the_same_addresses(
    options: AllocatorSettings, requests: list[tuple[str, int, int]]
) -> None:
    first, second = ([b.address for b in play(CachingAllocator(options), requests)] for _ in range(2))
    assert first == second


# --- steps

MODELS = st.builds(
    Model,
    name=st.just("drawn"),
    num_layers=st.integers(1, 4),
    d_model=st.sampled_from([64, 192]),
    num_heads=st.sampled_from([2, 4]),
    d_ff=st.sampled_from([96, 512]),
    vocab_size=st.sampled_from([97, 1000]),
    mlp=st.sampled_from(["swiglu", "gelu"]),
    norm=st.sampled_from(["rms", "layer"]),
    tied_embeddings=st.booleans(),
    parallel_residual=st.booleans(),
    positions=st.sampled_from(["rope", "learned"]),
    fused_qkv=st.booleans(),
)
STACKS = st.builds(
    Stack,
    name=st.just("drawn"),
    framework=st.just("drawn"),
    date=st.just("2026-01"),
    attention=st.builds(AttentionBackend, kernel=st.sampled_from(["flash2", "math"]), expand_kv_heads=st.booleans()),
    kernels=st.builds(
        Kernels,
        blocks=st.sampled_from(["eager", "compiled", "fused"]),
        norm=st.sampled_from(["eager", "fused"]),
        rope=st.sampled_from(["half", "complex_fp32", "fused"]),
        loss=st.sampled_from(["fp32_eager", "fp32_compiled", "fp32_in_place", "fused"]),
        early_stop=st.booleans(),
    ),
)
IMPLEMENTATIONS = [
    ("ddp", 0),
    ("zero_redundancy", 1),
    ("fsdp1", 0),
    ("fsdp1", 2),
    ("fsdp1", 3),
    ("fsdp2", 2),
    ("fsdp2", 3),
    *(("deepspeed", stage) for stage in range(4)),
    ("megatron", 0),
    ("megatron", 1),
]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    name, stage = draw(st.sampled_from(IMPLEMENTATIONS))
    ranks = draw(st.sampled_from([1, 3, 8]))
    return Plan.model_validate(
        {
            "data_parallel": name,
            "zero": stage,
            "dp_shard": ranks if stage else 1,
            "dp_replicate": draw(st.sampled_from([1, 2])) if stage and ranks > 1 else (1 if stage else ranks),
            "micro_batch_size": draw(st.integers(1, 3)),
            "num_micro_batches": draw(st.integers(1, 3)),
            "seq_len": 32,
            "precision": draw(st.sampled_from(["bf16", "fp32", "fp8"])),
            "reduce_dtype": draw(st.sampled_from([None, "bf16", "fp32"])),
            "recompute": draw(st.sampled_from(["none", "full", "selective", "every_k"])),
            "recompute_every": 2,
            "optimizer": draw(st.sampled_from(["adamw", "sgd", "adam8bit", "lion8bit"])),
            "optimizer_impl": draw(st.sampled_from(["fused", "foreach", "loop"])),
            "reshard_after_forward": draw(st.sampled_from([None, True, False, ranks])),
            "forward_prefetch": draw(st.integers(0, 2)),
            "backward_prefetch": draw(st.integers(0, 2)),
            "limit_all_gathers": draw(st.booleans()),
            "sync_every_micro_batch": draw(st.sampled_from([None, True, False])),
            "gradient_as_bucket_view": draw(st.booleans()),
        }
    )


@given(MODELS, STACKS, plans())
@examples(120)
def test_a_step_gives_back_what_it_took_and_never_frees_twice(model: Model, stack: Stack, plan: Plan) -> None:
    history = write_history(model, plan, stack, build_blocks(model, stack, plan), ())
    live: set[int] = set()
    for slot, num_bytes, _, _ in history.events:
        if num_bytes >= 0:
            assert slot not in live
            live.add(slot)
        elif num_bytes > -3:
            live.remove(slot)  # a KeyError is a storage freed twice, or before it was made
    course = step_live_bytes(history)
    assert course.final == course.resident
    allocator = CachingAllocator()
    reserved = step_reserved_bytes(history, allocator)
    assert all(held >= highest for (highest, _), held in zip(course.most, reserved, strict=True))


@given(MODELS, STACKS, plans(), st.none() | st.floats(0.5, 1))
@examples(60)
def test_all_calls_in_one_place_leave_what_each_by_itself_does(
    model: Model, stack: Stack, plan: Plan, share: float | None
) -> None:
    history = write_history(model, plan, stack, build_blocks(model, stack, plan), ())
    capacity = None if share is None else int(share * max(step_reserved_bytes(history, CachingAllocator())))
    apart = AllocatorSettings(max_non_split_rounding_bytes=MIB)  # means nothing where every block may be split
    left = []
    for settings in (None, apart):
        allocator = CachingAllocator(settings, capacity_bytes=capacity)
        try:
            reserved = step_reserved_bytes(history, allocator)
        except OutOfMemoryError as exc:
            reserved = [exc.needed_bytes]
        blocks = [(one.address, one.size, one.used) for one in allocator.blocks()]
        left.append((reserved, blocks, allocator.peak_reserved_bytes, allocator.num_retries))
    assert left[0] == left[1]


@given(MODELS, STACKS, plans())
@examples(40)
def test_categories_sum_to_the_peak_and_reserved_covers_it(model: Model, stack: Stack, plan: Plan) -> None:
    use, trace = simulate_memory(model, plan, stack, build_blocks(model, stack, plan), GPU)
    assert sum(use.by_category.values()) == use.peak_allocated_bytes == trace.peak.allocated_bytes
    assert use.resident_bytes <= use.peak_allocated_bytes <= use.low_reserved_bytes
    assert use.low_reserved_bytes <= use.peak_reserved_bytes <= use.high_reserved_bytes


@given(MODELS, plans(), st.integers(2, 64))
@examples(100)
def test_more_shard_ranks_never_raise_resident_bytes(model: Model, plan: Plan, ranks: int) -> None:
    if plan.zero == 0:
        return
    fields = plan.model_dump() | {"reshard_after_forward": None}
    few, many = (Plan.model_validate(fields | {"dp_shard": ranks * factor}) for factor in (1, 2))
    assert sum(resident_bytes(model, many).values()) <= sum(resident_bytes(model, few).values())
