"""Ops: what a block keeps, what it recomputes, and bytes of single kernels under each kind of stack."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.base.kernels import Gemm, Kernel, Stream
from simulator.parallel.model_shard import shard_of
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import AttentionBackend, Stack
from simulator.work.ops import (
    Block,
    ModelBlocks,
    Op,
    build_blocks,
    cached_tensors,
    num_launches,
    optimizer_kernels,
    recompute_ops,
)
from tests.examples import examples

ROOT = Path(__file__).resolve().parents[2]
MEMORY = ROOT.parent / "shared" / "data" / "memory.csv"
STEPS = ROOT / "experiments" / "measured" / "h200-2026-11-20" / "plans.jsonl"


def stack(**fields: object) -> Stack:
    kernel = fields.pop("kernel", "flash2")
    expand = fields.pop("expand", False)
    backend = AttentionBackend(kernel=kernel, expand_kv_heads=expand)  # type: ignore[arg-type]
    return Stack(name="s", framework="f", date="2026-01", attention=backend, **{"blocks": "eager", **fields})  # type: ignore[arg-type]


def llama(layers: int, d: int, heads: int, kv: int, ff: int, vocab: int) -> Model:
    return Model(name="t", num_layers=layers, d_model=d, num_heads=heads, num_kv_heads=kv, d_ff=ff, vocab_size=vocab)


def stream_bytes(ops: tuple[Op, ...], phase: str, category: str = "") -> int:
    kernels: list[Kernel] = [k for op in ops if category in ("", op.category) for k in getattr(op, phase)]
    return sum(k.num_bytes for k in kernels if isinstance(k, Stream))


# -- what is kept between forward and backward, against PyTorch -------------------------------------------------------


def kept_bytes(blocks: ModelBlocks, num_layers: int, rounding: int, *, cpu: bool = False) -> int:
    """Bytes alive after a forward beyond those before it: every saved storage and the loss. Inputs were there."""

    def kept(block: Block) -> int:
        tensors = [t for t in block.saved_tensors() if not (cpu and t.name.startswith("philox"))]
        return sum(-(-t.num_bytes // rounding) * rounding for t in tensors)

    return num_layers * kept(blocks.layer) + kept(blocks.head) + -(-4 // rounding) * rounding


def tracked_rows() -> list[dict[str, str]]:
    if not MEMORY.is_file():
        return []
    with MEMORY.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["strategy"] in ("single", "ddp") and row["ac"] == "none"]


@pytest.mark.skipif(not MEMORY.is_file(), reason="the table of tracked memory is not here")
@pytest.mark.parametrize("row", tracked_rows(), ids=lambda row: row["row"])
def test_saved_bytes_are_those_of_pytorchs_tracker(row: dict[str, str]) -> None:
    model = llama(*(int(row[k]) for k in ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab")))
    plan = Plan(
        zero=0,
        micro_batch_size=int(row["micro_batch"]),
        seq_len=int(row["seq_len"]),
        precision=row["param_dtype"],  # type: ignore[arg-type]
        master_dtype=row["store_dtype"],  # type: ignore[arg-type]
    )
    cpu = row["device"] == "cpu"
    blocks = build_blocks(model, stack(norm="eager", expand=row["attn"] != "flash_gqa"), plan)
    measured = int(row["after_fwd_bytes"]) - int(row["start_bytes"])
    assert kept_bytes(blocks, model.num_layers, 1 if cpu else 512, cpu=cpu) == measured


@pytest.mark.parametrize(
    ("name", "shape", "batch", "seq_len"),
    [
        ("l1B-s2048-mb4-w1-single-none-fused", (16, 2048, 32, 8, 8192, 128256), 4, 2048),
        ("l1B-s2048-mb8-w8-ddp-none-fused", (16, 2048, 32, 8, 8192, 128256), 8, 2048),
    ],
)
def test_an_h200_peaks_at_the_saved_bytes_and_two_logit_gradients(
    name: str, shape: tuple[int, ...], batch: int, seq_len: int
) -> None:
    """The peak of an eager step is in the loss's backward: all that is saved, and two fp32 gradients of the logits."""
    steps = {step["name"]: step for step in map(json.loads, STEPS.read_text().splitlines())}
    plan = Plan(zero=0, micro_batch_size=batch, seq_len=seq_len)  # autocast: fp32 parameters, bf16 compute
    blocks = build_blocks(llama(*shape), stack(norm="fused", expand=True), plan)
    logits = batch * seq_len * shape[5] * 4
    measured = steps[name]["peak_allocated_bytes"] - steps[name]["steady_allocated_bytes"]
    assert kept_bytes(blocks, shape[0], 512) + 2 * logits == measured


# -- laws over drawn models and stacks ----------------------------------------------------------------------------

stacks = st.builds(
    stack,
    blocks=st.sampled_from(["eager", "compiled", "fused"]),
    kernel=st.sampled_from(["flash1_triton", "flash2", "flash3", "cudnn", "math"]),
    expand=st.booleans(),
    norm=st.sampled_from(["eager", "fused"]),
    norm_dtype=st.sampled_from(["fp32", "compute"]),
    rope=st.sampled_from(["half", "complex_fp32", "fused"]),
    loss=st.sampled_from(["fp32_eager", "fp32_compiled", "fp32_in_place", "fused"]),
)
models = st.sampled_from(
    ["llama3-8b", "gpt2", "mpt-1b", "falcon-7b", "pythia-1b", "gemma2-2b", "qwen3-0.6b", "mistral-7b"]
).map(Model.load)
plans = st.builds(
    Plan,
    zero=st.sampled_from([0, 3]),
    precision=st.sampled_from(["fp32", "tf32", "bf16", "fp16", "fp8"]),
    micro_batch_size=st.integers(1, 3),
    seq_len=st.sampled_from([128, 512, 8192]),
    recompute=st.sampled_from(["none", "full", "selective", "every_k"]),
)


@examples(60)
@given(models, stacks, plans)
def test_every_tensor_is_made_before_it_is_read_and_every_gradient_has_a_taker(
    model: Model, stack: Stack, plan: Plan
) -> None:
    blocks = build_blocks(model, stack, plan)
    for block in (blocks.embedding, blocks.layer, blocks.head):
        known, differentiable = {block.input}, {block.input}
        for op in block.ops:
            assert set(op.inputs) <= known
            made = [t.name for t in op.outputs]
            assert not known.intersection(made)
            known.update(made)
            assert set(op.saved) <= known
            takers = {*(t.name for t in op.grad_inputs), *op.grad_aliases}
            assert takers <= known | differentiable
            differentiable.update(op.views, made)
        assert block.output in known
        assert all(kernel.num_bytes >= 0 for op in block.ops for kernel in (*op.forward, *op.backward))


@examples(40)
@given(models, stacks, plans)
def test_twice_the_sequences_keep_twice_the_bytes(model: Model, stack: Stack, plan: Plan) -> None:
    once = build_blocks(model, stack, plan).layer
    twice = build_blocks(model, stack, plan.copy_with(micro_batch_size=2 * plan.micro_batch_size)).layer
    shared = ("cos", "sin", "philox_seed", "philox_offset")  # not of a token
    first = {t.name: t.num_bytes for t in once.saved_tensors()}
    second = {t.name: t.num_bytes for t in twice.saved_tensors()}
    assert first.keys() == second.keys()
    for name, size in first.items():
        assert second[name] == (size if name in shared or name.endswith(".weight") else 2 * size)
    assert twice.forward_flop == 2 * once.forward_flop


@examples(40)
@given(models, stacks, plans)
def test_recomputation_runs_a_part_of_the_forward_in_its_order(model: Model, stack: Stack, plan: Plan) -> None:
    layer = build_blocks(model, stack, plan).layer
    again = recompute_ops(layer, plan, stack)
    remaining = iter(layer.ops)
    assert all(op in remaining for op in again)
    if plan.recompute.mode == "none":
        assert not again
    if plan.recompute.mode == "full" and not stack.kernels.early_stop:
        assert again == layer.ops


# -- single mechanisms --------------------------------------------------------------------------------------------

PLAN = Plan(dp_shard=8, micro_batch_size=2, seq_len=2048)
TOKENS = 2 * 2048


def test_early_stop_leaves_out_exactly_the_last_product() -> None:
    model, plan = Model.load("llama3-8b"), PLAN.copy_with(recompute="full")
    layer = build_blocks(model, stack(), plan).layer
    saved = sum(op.forward_flop for op in [layer]) - sum(
        k.flop for op in recompute_ops(layer, plan, stack()) for k in op.forward
    )
    assert saved == 2 * TOKENS * model.d_ff * model.d_model


def test_selective_recomputation_runs_no_product_and_no_attention() -> None:
    plan = PLAN.copy_with(recompute="selective")
    layer = build_blocks(Model.load("llama3-8b"), stack(), plan).layer
    again = recompute_ops(layer, plan, stack())
    assert again
    assert not sum(k.flop for op in again for k in op.forward)


def test_megatrons_selective_recomputation_is_the_core_of_unfused_attention() -> None:
    plan = PLAN.copy_with(recompute="selective")
    for kernel, names in (("math", ["scores", "probabilities", "o"]), ("cudnn", [])):
        fused = stack(blocks="fused", kernel=kernel)
        layer = build_blocks(Model.load("gpt2"), fused, plan).layer
        assert [op.name for op in recompute_ops(layer, plan, fused)] == names


def test_the_fused_softmax_takes_matrices_of_scores_by_fours() -> None:
    """Else: to fp32 6 B a score, scale 8, mask 8, softmax 8, back 6; backward 6, softmax 12, 8, 8, 6. The fp32 result is kept."""
    model, fused = (
        Model.load("gpt2").model_copy(update={"num_heads": 6, "num_kv_heads": 6}),
        stack(blocks="fused", kernel="math"),
    )
    for batch, fits in ((1, False), (2, True)):
        plan = PLAN.copy_with(micro_batch_size=batch, recompute="none")
        layer = build_blocks(model, fused, plan).layer
        ops = [op for op in layer.ops if op.category == "attention" and op.name not in ("scores", "o")]
        numel = batch * 6 * plan.seq_len**2
        moved = [stream_bytes(ops, direction) / numel for direction in ("forward", "backward")]
        assert moved == ([4, 6] if fits else [36, 40])
        kept = {t.name: t.num_bytes / numel for op in ops for t in op.outputs if t.name in op.saved}
        assert kept == ({"probabilities": 2} if fits else {"probabilities.float": 4})


def test_mpt_eager_streams_the_bytes_written_down_for_it() -> None:
    """In units of a [T, D] tensor. Forward: norms 2 × 2, sums 2 × 3, GELU 8. Backward: norms 2 × 5 (two passes),
    sums of gradients 2 × 3, bias gradients 9 (Wqkv 3, out 1, up 4, down 1), GELU 12, joining dQ, dK, dV 6."""
    model = Model.load("mpt-7b")
    layer = build_blocks(model, stack(), PLAN).layer
    unit = TOKENS * model.d_model * 2
    small = 0.02  # statistics and parameter gradients
    assert stream_bytes(layer.ops, "forward") / unit == pytest.approx(4 + 6 + 8, abs=small)
    assert stream_bytes(layer.ops, "backward") / unit == pytest.approx(10 + 6 + 9 + 12 + 6, abs=small)


def test_a_compiled_llama_moves_about_half_the_bytes_of_an_eager_one() -> None:
    moved = {
        blocks: sum(stream_bytes(build_blocks(Model.load("llama3-8b"), stack(blocks=blocks), PLAN).layer.ops, phase)
                    for phase in ("forward", "backward"))
        for blocks in ("eager", "compiled")
    }  # fmt: skip
    assert 0.4 < moved["compiled"] / moved["eager"] < 0.6


@pytest.mark.parametrize(
    ("fields", "vocab", "per_logit"),
    [
        ({"loss": "fp32_eager"}, 16_000, 44),  # cast 6, log-softmax 12, zeros 4, its backward 16, cast 6
        ({"loss": "fp32_eager"}, 128_000, 48),  # a third pass reads long rows from memory
        ({"loss": "fp32_compiled"}, 128_000, 8),  # read, read; read, write of 2 bytes
        ({"loss": "fused"}, 128_000, 8),
        # beside its 8 twice log-softmax of bf16 (reads of 2 bytes, three where rows are long, write 2) and the result's cast (6)
        ({"loss": "fused", "loss_metrics": 2}, 128_000, 8 + 2 * (8 + 6)),
        ({"loss": "fused", "loss_metrics": 2}, 16_000, 8 + 2 * (6 + 6)),
        # cast 6, maximum 4, subtract 8, exponentiate 8, sum 4, divide 8; scale 8, cast 6
        ({"loss": "fp32_in_place", "blocks": "fused"}, 128_000, 52),
        ({"loss": "fused", "blocks": "fused"}, 128_000, 44),  # 7 times the ideal 6: measured on H100
    ],
)
def test_bytes_of_the_loss_a_logit(fields: dict[str, object], vocab: int, per_logit: int) -> None:
    model = llama(2, 512, 8, 8, 1024, vocab)
    head = build_blocks(model, stack(**fields), PLAN).head
    total = sum(stream_bytes(head.ops, phase, "loss") for phase in ("forward", "backward"))
    assert total / (TOKENS * vocab) == pytest.approx(per_logit, abs=0.02)


def test_autocast_leaves_log_softmax_of_a_cross_entropy_in_16_bits() -> None:
    """What a metric's bytes rest on, seen in PyTorch's own dispatch: only the result is cast, for nll_loss."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func.__name__, args[0].dtype))
            return func(*args, **(kwargs or {}))

    seen: list[tuple[str, Any]] = []
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", True)  # noqa: FBT003 -- as torch.autocast would, if there were a GPU
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        with FakeTensorMode(), torch.no_grad():
            logits = torch.empty(4, 50368, dtype=torch.bfloat16, device="cuda")
            targets = torch.empty(4, dtype=torch.int64, device="cuda")
            with Recorder():
                torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
    kernels = [(name, dtype) for name, dtype in seen if name.startswith(("_log_softmax", "_to_copy", "nll_loss"))]
    assert kernels == [
        ("_log_softmax.default", torch.bfloat16),
        ("_to_copy.default", torch.bfloat16),
        ("nll_loss_forward.default", torch.float32),
    ]


def test_autocast_casts_weights_and_keeps_the_casts() -> None:
    """Plain modules hold fp32 weights: each is read (4 B) and written (2 B) forward; its gradient widened backward."""
    model = llama(2, 512, 8, 8, 1024, 1000)
    layer = build_blocks(model, stack(), Plan(zero=0, seq_len=128)).layer
    weights = [op for op in layer.ops if op.name.endswith(".weight")]
    numel = 4 * 512 * 512 + 3 * 512 * 1024
    assert stream_bytes(tuple(weights), "forward") == stream_bytes(tuple(weights), "backward") == 6 * numel
    assert {op.name for op in weights} <= {t.name for t in layer.saved_tensors()}
    sharded = build_blocks(model, stack(), Plan(dp_shard=8, seq_len=128)).layer
    assert not [op for op in sharded.ops if op.name.endswith(".weight")]


def test_gradients_of_a_tensor_with_three_users_cost_two_sums() -> None:
    model = Model.load("llama3-8b")
    layer = build_blocks(model, stack(), PLAN).layer
    unit = TOKENS * model.d_model * 2
    q, k, v = (next(op for op in layer.ops if op.name == name) for name in "qkv")
    sums = [[s for s in op.backward if isinstance(s, Stream)] for op in (q, k, v)]
    assert [sum(s.num_bytes for s in s_) for s_ in sums] == [3 * unit, 3 * unit, 0]


def test_fp8_products_are_fp8_in_the_layers_and_wide_in_the_head() -> None:
    plan = PLAN.copy_with(precision="fp8")
    for blocks in ("eager", "compiled", "fused"):
        built = build_blocks(Model.load("llama3-8b"), stack(blocks=blocks), plan)
        gemms = [
            {k.dtype for op in b.ops for k in op.forward if isinstance(k, Gemm)} for b in (built.layer, built.head)
        ]
        assert gemms == [{"fp8"}, {"bf16"}]


def test_context_parallel_ranks_share_the_work_evenly() -> None:
    model = Model.load("llama3-8b")
    whole = build_blocks(model, stack(), Plan(seq_len=8192)).layer
    part = build_blocks(model, stack(), Plan(seq_len=8192, cp=4)).layer
    assert 4 * part.forward_flop == whole.forward_flop
    assert 4 * part.backward_flop == whole.backward_flop


def test_fused_blocks_launch_fewer_kernels() -> None:
    counts = [
        num_launches(build_blocks(Model.load("llama3-8b"), stack(blocks=blocks), PLAN).layer, "forward")
        for blocks in ("eager", "compiled", "fused")
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2]


@pytest.mark.parametrize("name", ["qwen3-8b", "gemma3-4b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_every_stack_has_a_layer_of_every_kind(name: str) -> None:
    """Tensors of a block have names of their own, however norms, positions and adapters meet in it."""
    model = Model.load(name)
    for software in Stack.names():
        plan = Plan.model_validate({"zero": 0, "seq_len": 16, "peft": "lora", "stack": software})
        assert build_blocks(model, Stack.load(software), plan).layer.ops


# -- optimizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "per_parameter"),
    [
        ({"optimizer_impl": "fused"}, 28),  # read p g m v, write p m v
        ({"optimizer_impl": "foreach"}, 80),
        ({"optimizer_impl": "loop"}, 80),
        ({"optimizer": "sgd"}, 12),
        ({"optimizer": "sgd_momentum"}, 20),
        ({"optimizer": "adam8bit"}, 16),  # p and g in fp32, two states of a byte
        ({"optimizer": "adam4bit"}, 14),  # two of half a byte
        ({"optimizer": "lion"}, 20),  # one moment
        ({"optimizer": "lion8bit"}, 14),
        ({"optimizer": "lion", "master_dtype": "bf16", "optimizer_dtype": "bf16"}, 10),
        # twelve kernels of transformers' Adafactor read 13 tensors and write 8, all in fp32
        ({"optimizer": "adafactor", "data_parallel": "fsdp1"}, 4 * (13 + 8)),
        ({"optimizer_dtype": "bf16"}, 20),
        ({"zero": 1, "data_parallel": "megatron", "reduce_dtype": "fp32"}, 28 + 6),  # and the bf16 copy
        # bf16 gradients widened first; before that in fp64, whose norm is read, and made flat; scaled behind it
        ({"zero": 3, "data_parallel": "deepspeed"}, 28 + 6 + 6 + (2 + 8) + 8 + (2 + 2) + (4 + 4)),
    ],
)
def test_bytes_of_the_optimizer_a_parameter(fields: dict[str, object], per_parameter: int) -> None:
    plan = Plan(**{"dp_shard": 8, **fields})  # type: ignore[arg-type]
    kernels = optimizer_kernels(10**6, 100, plan)
    assert sum(k.num_bytes for k in kernels) == per_parameter * 10**6


def test_muon_multiplies_each_matrix_with_itself_five_times() -> None:
    # of an m × n matrix, m ≤ n: X Xᵀ, its square, their polynomial times X: 4 m² n + 2 m³ FLOP an iteration (torch/optim/_muon.py)
    parts = [("embedding", [(512, 64)]), ("layer0", [(128, 64), (64, 192), (64,)]), ("head", [(512, 64)])]
    numel = sum(math.prod(shape) for _, shapes in parts for shape in shapes)
    plan = Plan(optimizer="muon", zero=0, data_parallel="ddp")
    kernels = optimizer_kernels(numel, 5, plan, parts)
    gemms = [kernel for kernel in kernels if isinstance(kernel, Gemm)]
    assert sum(gemm.flop for gemm in gemms) == 5 * sum(4 * 64**2 * n + 2 * 64**3 for n in (128, 192))
    rest = kernels[-1]  # embedding, head and the norm are AdamW's
    assert isinstance(rest, Stream)
    assert rest.num_bytes == 28 * (2 * 512 * 64 + 64)


def test_galore_projects_gradients_and_steps() -> None:
    parts = [("layer0", [(128, 64), (64, 192)])]
    plan = Plan(
        optimizer="galore", galore_rank=16, zero=0, data_parallel="ddp", master_dtype="bf16", optimizer_dtype="bf16"
    )
    gemms = [k for k in optimizer_kernels(128 * 64 + 64 * 192, 2, plan, parts) if isinstance(k, Gemm)]
    assert sum(gemm.flop for gemm in gemms) == 2 * 2 * 16 * (128 * 64 + 64 * 192)
    assert {gemm.dtype for gemm in gemms} == {"bf16"}


def test_a_loop_launches_for_every_tensor() -> None:
    loop, foreach = (
        sum(k.launches for k in optimizer_kernels(10**6, 320, Plan(optimizer_impl=impl)) if isinstance(k, Stream))
        for impl in ("loop", "foreach")
    )
    assert loop == 32 * foreach


def test_a_compiler_keeps_no_product_that_nobody_reads_again() -> None:
    """The result of a block's last product goes into the residual sum alone, whose gradient needs neither of its parts."""
    plan = Plan(recompute="selective", seq_len=16)
    kept = {}
    for blocks in ("eager", "compiled"):
        setting = stack(blocks=blocks)
        layer = build_blocks(llama(1, 64, 4, 2, 128, 1000), setting, plan).layer
        kept[blocks] = cached_tensors(layer, recompute_ops(layer, plan, setting), plan, setting)
    assert "down" in kept["eager"] - kept["compiled"]
    assert {"q", "k", "gate", "up", "o"} <= kept["eager"] & kept["compiled"]


# -- Megatron on Transformer Engine -----------------------------------------------------------------------------------


def kept_a_token(plan: Plan) -> float:
    """Bytes a token that one layer of Llama 3 70B keeps."""
    layer = build_blocks(Model.load("llama3-70b"), Stack.load("megatron-core-2025"), plan).layer
    tokens = plan.micro_batch_size * plan.seq_len // plan.cp
    return sum(t.num_bytes for t in layer.saved_tensors()) / tokens


def test_a_layer_of_transformer_engine_keeps_each_tensor_once() -> None:
    """Two norms' inputs and outputs, Q, K, V, the output, both halves of SwiGLU and its product; statistics in fp32."""
    d, kv, ff, heads = 8192, 1024, 28672, 64
    once = 2 * (4 * d + d + 2 * kv + d + 2 * ff + ff) + 4 * heads + 2 * 4
    swapped = Plan(cp=8, seq_len=8192, cp_exchange="all_to_all")
    assert kept_a_token(Plan(seq_len=8192)) == pytest.approx(once, abs=0.01)
    assert kept_a_token(Plan(cp=8, seq_len=8192)) == pytest.approx(once, abs=0.03)
    assert kept_a_token(swapped) == pytest.approx(once + 2 * d, abs=0.03)  # the output by heads, and by tokens


@pytest.mark.parametrize(("tp", "copied"), [(1, 8192), (4, 2048), (8, 0)])
def test_megatron_copies_queries_out_of_their_groups(tp: int, copied: int) -> None:
    """Joint columns go by group; the queries of several groups of a rank are no view, those of one group are."""
    model = Model.load("llama3-70b")
    plan = Plan(seq_len=4096, tp=tp, sequence_parallel=tp > 1, zero=1, data_parallel="megatron", dp_shard=8 // tp)
    layer = build_blocks(shard_of(model, plan), Stack.load("megatron-core-2025"), plan).layer
    (split,) = (op for op in layer.ops if op.name == "split")
    assert sum(k.numel for k in split.forward if isinstance(k, Stream)) == 4096 * copied


def test_swapping_heads_does_the_work_of_a_ring() -> None:
    model, te = Model.load("llama3-70b"), Stack.load("megatron-core-2025")
    ring, swap = (
        build_blocks(model, te, Plan(cp=8, seq_len=8192, cp_exchange=how)).layer  # type: ignore[arg-type]
        for how in ("ring", "all_to_all")
    )
    assert ring.forward_flop == swap.forward_flop
    sent = [e for op in swap.ops for e in op.forward_exchanges]
    assert {e.kind for e in sent} == {"all_to_all"}
    assert sum(e.num_bytes for e in sent) == 1024 * 2 * (8192 + 2 * 1024 + 8192)  # Q, K, V there, the output back
    # Transformer Engine: torch's `contiguous` by heads, a compiled copy by chunks of the sequence, each way
    copies = [k for op in swap.ops if op.name.startswith("swap to") for k in (*op.forward, *op.backward)]
    assert [k.op for k in copies if isinstance(k, Stream)] == ["strided", "copy"] * 4
    assert sum(k.numel for k in copies if isinstance(k, Stream)) == 4 * 1024 * (8192 + 2 * 1024 + 8192)


def test_a_loss_in_place_makes_no_second_tensor() -> None:
    model = llama(1, 64, 4, 2, 128, 1000)
    head = build_blocks(model, stack(blocks="fused", loss="in_place"), Plan(seq_len=16)).head
    loss = next(op for op in head.ops if op.category == "loss")
    assert loss.grad_overwrites == loss.saved == ("logits",)
    assert not loss.grad_inputs


def test_gpt_oss_runs_clamps_and_scaled_positions_by_operators_in_megatron() -> None:
    # Megatron-LM core/fusions/fused_bias_geglu.py (chunk, clamp each half, cat) and rope_utils.py (mscale != 1: unfused)
    model = Model.load("gpt-oss-20b")
    plan = Plan.model_validate({"data_parallel": "megatron", "zero": 0, "seq_len": 1024, "stack": "megatron-core-2025"})
    block = build_blocks(model, Stack.load(plan.stack), plan).layer
    ops = {op.name: op for op in block.ops}
    rows = 1024 * 4
    up_bytes = 2 * rows * 2 * 2880
    clamped = ops["clamped"]
    assert [k.num_bytes for k in clamped.forward] == [up_bytes, up_bytes, 2 * up_bytes]
    assert clamped.saved == ("experts.up",)
    assert "q.swapped" in ops
    assert "k.swapped" in ops
    plain = model.model_copy(update={"gate_clamp": 0.0, "rotary_scale": 1.0})
    fused = {op.name: op for op in build_blocks(plain, Stack.load(plan.stack), plan).layer.ops}
    assert "clamped" not in fused
    assert len(fused["q.rotated"].forward) == 1
    assert len(ops["q.rotated"].forward) == 2  # the sum, and the cat with channels that do not turn
