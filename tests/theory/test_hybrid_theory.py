"""Hybrids of Mamba-2, attention, MLPs and experts: parameters, FLOP, bytes and splits, derived from the papers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import pytest

from simulator.base.kernels import Attention, Gemm, Kernel, Scan, Stream
from simulator.parallel.model_shard import shard_of
from simulator.spec.calibration import Calibration
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import Block, build_blocks
from simulator.work.script import units

STACK = Stack.load("megatron-core-2025")
TINY = Model.model_validate(
    {
        "name": "tiny",
        "family": "nemotron_h",
        "pattern": "M-M*ME",
        "d_model": 256,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 32,
        "d_ff": 1024,
        "vocab_size": 1024,
        "mlp": "squared_relu",
        "positions": "none",
        "mamba": {"num_heads": 16, "head_dim": 32, "num_groups": 4, "state_dim": 64, "chunk_size": 128},
        "experts": {"num_experts": 8, "top_k": 2, "d_ff": 512, "shared_d_ff": 512},
    }
)


def megatron(**fields: object) -> Plan:
    return Plan.model_validate({"zero": 1, "data_parallel": "megatron", "stack": STACK.name, **fields})


def block(model: Model, plan: Plan, name: str, stack: Stack = STACK) -> Block:
    return next(b for b in build_blocks(model, stack, plan).body if b.name == name)


def kernels(found: Block, *, backward: bool) -> list[Kernel]:
    return [kernel for op in found.ops for kernel in (op.backward if backward else op.forward)]


# -- parameters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("nemotron-h-8b", "8.1"),  # arXiv 2504.03624
        ("nemotron-h-47b", "47"),
        ("nemotron-h-56b", "56"),
        ("nemotron-nano-9b-v2", "8.89"),  # arXiv 2508.14444
        ("nemotron-nano-12b-v2", "12.31"),
        ("nemotron-3-nano-30b-a3b", "31.6"),  # arXiv 2512.20848
        ("nemotron-3-super-120b-a12b", "120.7"),  # its report prints 120.6, cut off; without the module of prediction
    ],
)
def test_a_hybrid_has_its_published_parameters(name: str, total: str) -> None:
    model = Model.load(name).model_copy(update={"mtp_layers": 0})
    digits = len(total.partition(".")[2])
    assert f"{model.num_parameters / 1e9:.{digits}f}" == total


def test_nemotron_3_nano_works_with_3_2_billion_and_3_6_with_the_lookup() -> None:
    model = Model.load("nemotron-3-nano-30b-a3b")
    assert f"{model.num_active_parameters / 1e9:.1f}" == "3.6"
    assert f"{(model.num_active_parameters - model.vocab_size * model.d_model) / 1e9:.1f}" == "3.2"


def test_parameters_of_a_mixer_by_hand() -> None:
    """Nemotron-H-8B: D 4096, H 128, P 64, G 8, N 128. In: z, x (8192 each), B, C (1024 each), dt (128)."""
    model = Model.load("nemotron-h-8b")
    into = 4096 * (2 * 8192 + 2 * 1024 + 128)
    convolution = (8192 + 2 * 1024) * (4 + 1)
    expected = 4096 + into + convolution + 3 * 128 + 8192 + 8192 * 4096
    assert model.num_parameters_of("mamba") == expected
    kinds = Counter(model.layer_kinds)
    assert kinds == {"mamba": 24, "mlp": 24, "attention": 4}
    mlp = 4096 + 2 * 4096 * 21504
    attention = 4096 + 4096 * (4096 + 2 * 1024) + 4096 * 4096
    tables = 2 * 131072 * 4096 + 4096
    assert model.num_parameters == 24 * expected + 24 * mlp + 4 * attention + tables


# -- FLOP --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nemotron-h-8b", "nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b"])
@pytest.mark.parametrize("stack", ["megatron-core-2025", "torch-2.6-eager", "torch-2.11-compiled"])
def test_products_are_six_flop_a_parameter_and_token(name: str, stack: str) -> None:
    model, plan = Model.load(name), Plan(micro_batch_size=2, seq_len=1024, zero=3)
    built = build_blocks(model, Stack.load(stack), plan)
    counts = Counter(model.body)
    found = [k for b in (built.embedding, built.head) for op in b.ops for k in (*op.forward, *op.backward)]
    for one in built.body:
        found += counts[one.name] * [k for op in one.ops for k in (*op.forward, *op.backward)]
    tokens = plan.micro_batch_size * plan.seq_len
    assert sum(k.flop for k in found if isinstance(k, Gemm)) == 6 * model.num_matmul_parameters * tokens
    layers = model.num_attention_layers + model.mtp_layers * model.mtp_passes
    pairs = plan.micro_batch_size * layers * model.num_heads * plan.seq_len**2 // 2
    assert sum(k.flop for k in found if isinstance(k, Attention)) == 7 * 2 * pairs * model.head_dim


def test_model_flop_count_the_recurrence_without_chunks() -> None:
    """Each token and head: an outer product into P × N states, and their product with C: 4 P N, thrice with the backward."""
    model, s = Model.load("nemotron-h-8b"), 8192
    attention = 12 * 4 * 32 * 128 * s * s // 2
    scan = 24 * 3 * 4 * 128 * 64 * 128 * s
    assert model.model_flop_per_sequence(s) == 6 * model.num_matmul_parameters * s + attention + scan


@pytest.mark.parametrize(("batch", "seq_len"), [(1, 4096), (2, 1024)])
@pytest.mark.parametrize("stack", ["megatron-core-2025", "torch-2.6-eager"])
def test_flop_of_the_chunked_scan(batch: int, seq_len: int, stack: str) -> None:
    """arXiv 2405.21060, section 6: a batched product over chunks of Q tokens for each of the four parts.

    Off the diagonal: C and B meet in Q × Q squares a group (N deep), which weigh x (P channels a head, half the square);
    states are made of B and x, and read by C (Q deep, N × P a head). Squares are masked in tiles of 64 rows: of 128 × 128,
    three tiles of four.
    """
    m = TINY.mamba
    assert m is not None
    q, n, p, h, g = 128, m.state_dim, m.head_dim, m.num_heads, m.num_groups
    chunks = batch * seq_len // q
    states, read = chunks * h * 2 * q * n * p, chunks * h * 2 * q * n * p
    squares, inside = chunks * g * 2 * q * q * n, chunks * h * 2 * q * q * p * 3 // 4
    found = block(TINY, Plan(micro_batch_size=batch, seq_len=seq_len), "mamba", Stack.load(stack))
    forward = sum(k.flop for k in kernels(found, backward=False) if isinstance(k, Scan))
    assert forward == states + read + squares + inside
    # Backward: both factors of each of the four products, C Bᵀ and the states made again, and the decays' own square
    backward = sum(k.flop for k in kernels(found, backward=True) if isinstance(k, Scan))
    assert backward == 2 * forward + states + squares + inside


# -- bytes -------------------------------------------------------------------------------------------------------


def test_bytes_of_the_scan_forward() -> None:
    """Each kernel reads its inputs and writes its results once: decays and C Bᵀ in fp32, states in fp32 and then 16 bits."""
    m, t = TINY.mamba, 4096
    assert m is not None
    inner, grouped, heads = t * 512 * 2, t * 4 * 64 * 2, t * 16
    states, squares = t // 128 * 512 * 64, t // 128 * 4 * 128 * 128 * 4
    convolution = 2 * (inner + 2 * grouped)
    decays = heads * 2 + 2 * heads * 4
    chunk_states = inner + grouped + 2 * heads * 4 + 4 * states
    passing = 4 * states + 2 * states
    scores = 2 * grouped + squares
    # C Bᵀ, x, C, decays, states, z; the result and the gated one
    last = squares + inner + grouped + 2 * heads * 4 + 2 * states + inner + 2 * inner
    (scan,) = (op for op in block(TINY, megatron(seq_len=t), "mamba").ops if op.name == "scan")
    moved = sum(k.num_bytes for k in scan.forward if isinstance(k, Scan | Stream))
    assert moved == convolution + decays + chunk_states + passing + scores + last


def test_squared_relu_of_two_operators() -> None:
    """torch.pow(relu(x), 2) of u bytes: forward ReLU 2 u, power 2 u; backward a copy 2 u, times two 2 u, times the gradient 3 u,
    ReLU's own 3 u. One fused kernel reads and writes once, and backward reads two and writes one."""
    stack, hidden = Stack.load("megatron-core-2025"), 4096 * 1024 * 2
    for update, forward, backward in (({}, 2, 3), ({"squared_relu": "operators"}, 4, 10)):
        found = block(TINY, megatron(seq_len=4096), "mlp", stack.copy_with(**update))
        ops = [op for op in found.ops if op.name in ("relu", "activation")]
        assert sum(k.num_bytes for op in ops for k in op.forward if isinstance(k, Stream)) == forward * hidden
        assert sum(k.num_bytes for op in ops for k in op.backward if isinstance(k, Stream)) == backward * hidden
        assert all(op.by_torch == bool(update) for op in ops)


def test_gradients_added_by_a_hook_cost_three_passes_of_the_weights() -> None:
    """In bf16: the gradient and the kept one are read, the kept one is written; the products add nothing themselves."""
    stack = Stack.load("megatron-core-2025")
    plan = megatron(seq_len=4096, num_micro_batches=2)
    within, apart = (
        block(TINY, plan, "mlp", stack.copy_with(weight_gradients=how)) for how in ("accumulated", "added")
    )
    moved = [sum(k.num_bytes for k in kernels(b, backward=True) if isinstance(k, Stream)) for b in (within, apart)]
    assert moved[1] - moved[0] == 3 * 2 * (2 * 256 * 1024)
    assert not any(k.accumulate_fp32 for k in kernels(apart, backward=True) if isinstance(k, Gemm))


def test_what_megatrons_mixer_keeps() -> None:
    """The stream and the norm's output (the product's input), z x B C dt, the scan's result plain and gated (the norm's
    input), and the normed one (the product's input); statistics in fp32."""
    t, d, inner = 4096, 256, 512
    projected = 2 * inner + 2 * 4 * 64 + 16
    expected = 2 * t * (2 * d + projected + 3 * inner) + 4 * t * (1 + 4)
    assert block(TINY, megatron(seq_len=t), "mamba").saved_bytes == expected


def test_hugging_faces_mixer_makes_the_input_of_its_last_product_again() -> None:
    """mamba_split_conv1d_scan_combined with the norm's and the product's weights keeps its input and the scan's result."""
    t, d, inner = 4096, 256, 512
    projected = 2 * inner + 2 * 4 * 64 + 16
    stack = Stack.load("torchtitan-2025-compiled")
    plan = Plan(seq_len=t, dp_shard=8)
    expected = 2 * t * (2 * d + projected + inner) + 4 * t * (1 + 4)
    assert block(TINY, plan, "mamba", stack).saved_bytes == expected


# -- splits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_splits_heads_and_groups(tp: int) -> None:
    """All of a mixer but the norm of the stream is split (Megatron-LM, core/ssm/mamba_mixer.py)."""
    plan = megatron(tp=tp, sequence_parallel=True, seq_len=1024)
    share = shard_of(TINY, plan)
    whole = TINY.num_parameters_of("mamba") - TINY.d_model
    assert tp * (share.num_parameters_of("mamba") - TINY.d_model) == whole
    ranks, one = block(TINY, plan, "mamba"), block(TINY, megatron(seq_len=1024), "mamba")
    for kind in (Gemm, Scan):
        both = [[k for k in kernels(b, backward=True) if isinstance(k, kind)] for b in (ranks, one)]
        split, together = (sum(k.flop for k in found) for found in both)
        assert tp * split == together


def test_collectives_of_a_mixer_are_those_of_an_mlp() -> None:
    """One all-gather in, one reduce-scatter out, of the whole [T, D]; backward the same and one gather for the weights."""
    plan = megatron(tp=2, sequence_parallel=True, seq_len=1024)
    size = 1024 * 256 * 2
    for name in ("mamba", "mlp"):
        ops = block(TINY, plan, name).ops
        there, back = Counter[str](), Counter[str]()
        for op in ops:
            for e in op.forward_exchanges:  # sent in parts
                there[e.kind] += e.num_bytes
            for e in op.backward_exchanges:
                back[e.kind] += e.num_bytes
        assert there == {"all_gather": size, "reduce_scatter": size}
        assert back == {"all_gather": 2 * size, "reduce_scatter": size}


@pytest.mark.parametrize(("cp", "groups"), [(2, 4), (4, 4), (8, 8)])
def test_context_parallelism_swaps_heads_for_tokens(cp: int, groups: int) -> None:
    """There z, x, B, C and dt of a rank's tokens, back the result; B and C repeated where cp exceeds the groups."""
    plan = megatron(cp=cp, seq_len=4096)
    t = 4096 // cp
    sent = t * (2 * 512 + 2 * groups * 64 + 16) * 2
    found = block(TINY, plan, "mamba")
    exchanges = [e for op in found.ops for e in op.forward_exchanges]
    assert [(e.kind, e.axis, e.num_bytes) for e in exchanges] == [
        ("all_to_all", "cp", sent),
        ("all_to_all", "cp", t * 512 * 2),
    ]
    if groups == 4:
        flop = [sum(k.flop for k in kernels(b, backward=False) if isinstance(k, Scan)) for b in (found,)]
        (alone,) = [
            sum(
                k.flop
                for k in kernels(block(TINY, megatron(seq_len=4096), "mamba"), backward=False)
                if isinstance(k, Scan)
            )
        ]
        assert cp * flop[0] == alone


def test_stages_hold_their_part_of_the_pattern() -> None:
    plan = megatron(pp=2, num_micro_batches=4, seq_len=1024)
    first, last = (shard_of(TINY, plan, stage) for stage in (0, 1))
    assert first.layer_kinds == ("mamba", "mlp", "mamba")
    assert last.layer_kinds == ("attention", "mamba", "moe")
    assert first.num_parameters + last.num_parameters == TINY.num_parameters


def test_fsdp_has_a_unit_a_layer() -> None:
    plan = Plan(dp_shard=8, seq_len=1024)
    _, *layers = units(TINY, plan)
    sizes = [unit.numel for unit in layers]
    assert sizes == [TINY.num_parameters_of(kind) for kind in TINY.layer_kinds]


def test_experts_behind_a_projection_travel_at_its_width() -> None:
    """Nemotron 3 Super: 22 rows a token of 1,024 channels each way; two more products of D × 1,024.

    Each row's weight travels in fp32 behind it, and before them each of 8 ranks tells its 8-byte count for each of 512 experts.
    """
    model = Model.load("nemotron-3-super-120b-a12b")
    assert model.experts is not None
    plan = megatron(dp_shard=8, ep=8, seq_len=1024)
    found = block(model, plan, "moe")
    sent = {e.num_bytes for op in found.ops for e in (*op.forward_exchanges, *op.backward_exchanges)}
    assert sent == {1024 * 22 * 1024 * 2, 1024 * 22 * 4, 8 * 512 * 8}
    shapes = dict(model.parameter_shapes("moe"))
    assert prod(shapes["latent_down.weight"]) == prod(shapes["latent_up.weight"]) == 4096 * 1024
    assert shapes["experts.up.weight"] == (512, 2688, 1024)


# -- time --------------------------------------------------------------------------------------------------------


def test_an_ideal_machine_scans_at_its_peak_or_its_memorys() -> None:
    device = Device.load("h100-sxm5-80gb")
    busy = Scan(flop=10**15, read_bytes=1, write_bytes=1, dtype="bf16", head_dim=64, direction="forward")
    moving = Scan(flop=1, read_bytes=10**12, write_bytes=10**12, dtype="bf16", head_dim=64, direction="forward")
    timer = Calibration.ideal().timer(device)
    assert timer.kernel_s(busy) == pytest.approx(1e15 / device.peak("bf16"))
    assert timer.kernel_s(moving) == pytest.approx(2e12 / device.memory_bytes_per_s)


def test_a_scans_kernel_takes_its_bytes_and_its_products_one_after_the_other() -> None:
    """docs/background/hybrids.md: products at 0.64 of FlashAttention-2's speed, by direction and channels of a head."""
    device = Device.load("h100-sxm5-80gb")
    calibration = Calibration.for_device(device)
    backend = Stack.load("torch-2.6-eager").attention.model_copy(update={"kernel": "flash2"})
    timer = calibration.timer(device, backend)
    long = Attention(
        batch=1, seq_q=2**20, seq_kv=2**20, num_heads=64, num_kv_heads=64, head_dim=64, causal=True,
        direction="backward", dtype="bf16",
    )  # fmt: skip
    busy = Scan(flop=long.flop, read_bytes=1, write_bytes=1, dtype="bf16", head_dim=64, direction="backward")
    assert timer.kernel_s(long) / timer.kernel_s(busy) == pytest.approx(0.64, rel=0.01)
    moving, both = replace(busy, flop=0, read_bytes=10**12), replace(busy, read_bytes=10**12)
    assert timer.kernel_s(both) == pytest.approx(timer.kernel_s(busy) + timer.kernel_s(moving))
    assert calibration.sigma("scan", device) == 0.3


@pytest.mark.parametrize(("seq_len", "tflops"), [(1024, 107), (2048, 110), (4096, 106)])
def test_the_published_speeds_of_a_scans_kernel(seq_len: int, tflops: float) -> None:
    """tilelang, benchmark/mamba2: mamba-ssm's _chunk_scan_fwd on H800 SXM, 8 × 80 heads of 64 channels, 128 states, chunks of 256.

    Its TFLOP/s count T Q I + 2 T I N. It reads x, C, C Bᵀ, states and decays, all in 16 bits, and leaves the clock at its highest.
    """
    t, i, q, n = 8 * seq_len, 80 * 64, 256, 128
    read = 2 * (t * i + t * n + t * q + t // q * i * n + 2 * t * 80)
    kernel = Scan(
        flop=t * i * (q + 64) + 2 * t * i * n, read_bytes=read, write_bytes=2 * t * i, dtype="fp16", head_dim=64,
        direction="forward",
    )  # fmt: skip
    device = Device.load("h100-sxm5-80gb")
    measured_s = t * i * (q + 2 * n) / (tflops * 1e12)
    assert Calibration.for_device(device).timer(device, use=0).kernel_s(kernel) == pytest.approx(measured_s, rel=0.05)


def test_a_repeated_module_costs_its_passes_and_one_set_of_parameters() -> None:
    base = TINY.model_copy(update={"mtp_layers": 1})
    twice = base.model_copy(update={"mtp_passes": 2})
    assert twice.num_parameters == base.num_parameters
    plan = megatron(seq_len=1024)
    once, again = (block(m, plan, "mtp") for m in (base, twice))
    assert again.forward_flop == 2 * once.forward_flop
    more = 6 * (TINY.vocab_size * TINY.d_model + base._matmul_parameters_of("mtp")) * 1024
    attention = 6 * 2 * TINY.q_width * 1024 * 1024 // 2
    assert twice.model_flop_per_sequence(1024) - base.model_flop_per_sequence(1024) == more + attention
