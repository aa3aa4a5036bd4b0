"""Fine-tuning: what is trained, what it costs and what it sends, by the arithmetic of adapters and of stored weights."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from simulator import Cluster, Model, Plan, predict
from simulator.base.errors import InputError, ModelError, PlanError
from simulator.base.kernels import Gemm, Stream
from simulator.cli import main
from simulator.formats.readers.adapter_config import read_adapter_config
from simulator.formats.readers.peft_words import matched
from simulator.memory import simulate_memory
from simulator.memory.tapes import record
from simulator.parallel.legality import check, check_split
from simulator.parallel.model_shard import shard_of
from simulator.predict.changes import changes
from simulator.spec.calibration import Calibration
from simulator.spec.cluster.device import Device
from simulator.spec.software.stack import Stack
from simulator.work.checkpoint import Checkpoint, saving
from simulator.work.offload.moves import moves
from simulator.work.offload.tier_usage import tier_usage
from simulator.work.ops import build_blocks
from simulator.work.parameters import frozen, frozen_bytes, model_flop, stored, trained, trained_numel
from simulator.work.script import communication, gradient_tensors, paged_bytes, resident_tensors, units
from simulator.work.script.fsdp1 import FSDP1
from simulator.work.script.fsdp2 import FSDP2
from simulator.work.script.order import Chunk

LLAMA = Model.load("llama3-8b")
ATTENTION = ("q", "k", "v", "out")
ALONE: dict[str, Any] = {"zero": 0, "seq_len": 512, "master_dtype": "bf16"}


def lora(**fields: Any) -> Plan:
    """LoRA on one GPU in plain bf16."""
    return Plan(**{"peft": "lora", **ALONE, **fields})


@pytest.mark.parametrize(
    (
        "name",
        "count",
    ),  # trainable parameters that LitGPT prints with rank 8 on queries and values (tutorials/resource-tables.md)
    [("phi-1.5", 1_572_864), ("llama2-7b", 4_194_304)],
)
def test_published_counts(name: str, count: int) -> None:
    assert trained_numel(Model.load(name), lora(lora_rank=8, lora_targets="q_proj,v_proj")) == count


def test_a_pair_has_rank_times_both_widths() -> None:
    m, r = LLAMA, 16
    d, kv, f = m.d_model, m.kv_width, m.d_ff
    attention = 2 * (d + d) + 2 * (d + kv)
    assert trained_numel(m, lora(lora_targets="attention")) == m.num_layers * r * attention
    assert trained_numel(m, lora()) == m.num_layers * r * (attention + 3 * (d + f))
    assert trained_numel(m, lora(peft="dora")) == trained_numel(m, lora()) + m.num_layers * (2 * d + 2 * kv + 2 * f + d)
    assert trained_numel(m, lora(peft="ia3")) == m.num_layers * (2 * kv + f)  # k, v, and what enters down
    assert trained_numel(m, lora(peft="prefix", prefix_tokens=20)) == m.num_layers * 20 * 2 * kv
    assert trained_numel(m, lora(train_modules="embedding,lm_head")) == trained_numel(m, lora()) + 2 * m.vocab_size * d


def test_adapters_of_some_layers_with_ranks_of_their_own() -> None:
    m, of = (
        LLAMA,
        {"q": 2 * LLAMA.d_model, "v": LLAMA.d_model + LLAMA.kv_width, "mlp": 3 * (LLAMA.d_model + LLAMA.d_ff)},
    )
    some = lora(lora_rank=8, lora_targets="layers.4-7.q:32,layers.30-.v,mlp:4,q_proj")
    wanted = 4 * 32 * of["q"] + (m.num_layers - 4) * 8 * of["q"] + 2 * 8 * of["v"] + m.num_layers * 4 * of["mlp"]
    assert trained_numel(m, some) == wanted
    blocks = build_blocks(m, Stack.load("transformers-2024"), some)
    assert [block.name for block in blocks.body] == ["layer@0", "layer@4", "layer@30", "layer@0-lowest"]
    for block in blocks.body:
        made = sum(op.parameter_numel for op in block.ops)
        assert made == sum(prod(shape) for _, shape in trained(m, block.name, some))  # type: ignore[arg-type]
    for plan in (some.copy_with(dp_shard=4, zero=3), some.copy_with(dp_replicate=4, data_parallel="ddp")):
        assert sum(unit.shard_numel for unit in units(m, plan)) * plan.dp_shard == wanted


@pytest.mark.parametrize("whose", ["ddp", "fsdp1", "fsdp2", "deepspeed"])
def test_layers_below_all_that_is_trained_have_no_backward(whose: str) -> None:
    """Nothing kept, no products, no gathers in the backward; 2 FLOP a token and element; gradients of the others alone."""
    way = {"zero": 0, "dp_replicate": 4} if whose == "ddp" else {"zero": 3, "dp_shard": 4}
    ends = "embedding,lm_head,norm.weigh[t]"  # the root, which FSDP1 holds in one vector
    plan = Plan(**{**ALONE, **way, "data_parallel": whose, "freeze_modules": f"{ends},layers.0-9"})
    blocks = build_blocks(LLAMA, Stack.load("transformers-2024"), plan)
    idle, live, lowest = blocks.body
    assert (idle.name, live.name, lowest.name) == ("layer@0-forward", "layer@10", "layer@10-lowest")
    assert idle.saved_bytes == idle.backward_flop == 0
    assert idle.forward_flop == live.forward_flop
    assert live.backward_flop > 2 * live.forward_flop  # attention's is made again
    if whose.startswith("fsdp"):
        comms = {one.unit: one for one in communication(LLAMA, plan)}
        assert comms["layer9"].all_gather_backward_bytes == comms["layer9"].reduce_scatter_bytes == 0
        assert comms["layer9"].all_gather_forward_bytes == comms["layer10"].all_gather_forward_bytes
    layer = sum(prod(shape) for _, shape in LLAMA.parameter_shapes("layer"))
    still = 10 * layer + (2 * LLAMA.vocab_size + 1) * LLAMA.d_model
    assert trained_numel(LLAMA, plan) == LLAMA.num_parameters - still
    held = resident_tensors(LLAMA, plan)
    share = 1 if whose == "ddp" else 4
    assert abs(sum(held["parameters"]) * share - 2 * LLAMA.num_parameters) < 8 * 4 * LLAMA.num_layers
    made = gradient_tensors(LLAMA, plan) or held["gradients"]
    assert abs(sum(made) * share - 2 * (LLAMA.num_parameters - still)) < 2 * 4 * LLAMA.num_layers
    assert (
        lowest.backward_flop == live.backward_flop
    )  # its norms are trained, so products give gradients of their inputs
    # with adapters the embedding's output needs gradients where activations are recomputed (peft_model.py)
    tuned = {mode: lora(lora_targets="layers.10-", recompute=mode) for mode in ("none", "full")}
    names = {mode: build_blocks(LLAMA, Stack.load("transformers-2024"), of).body[0].name for mode, of in tuned.items()}
    assert names == {"none": "layer@0-forward", "full": "layer@0"}


def test_what_megatron_recomputes_inside_a_layer_wakes_none_below() -> None:
    """NeMo's bridge asks gradients of the embedding's output where layers are checkpointed whole (peft/recompute.py)."""
    way = {"data_parallel": "megatron", "zero": 1, "dp_shard": 4, "lora_targets": "layers.10-"}
    tuned = {mode: lora(**way, recompute=mode) for mode in ("none", "selective", "full")}
    names = {mode: build_blocks(LLAMA, Stack.of(of), of).body[0].name for mode, of in tuned.items()}
    assert names == {"none": "layer@0-forward", "selective": "layer@0-forward", "full": "layer@0"}


def test_the_first_layer_makes_no_gradients_of_its_input() -> None:
    """Nothing below it is trained: its norm keeps nothing, masks and products for its input's gradient are not made."""
    plan, layers = lora(lora_dropout=0.1, lora_rank=8), LLAMA.num_layers
    blocks = build_blocks(LLAMA, Stack.load("transformers-2024"), plan)
    usual, lowest = blocks.body
    ops = {op.name: op for op in lowest.ops}
    assert shard_of(LLAMA, plan).body == ("layer@0-lowest", *("layer@0",) * (layers - 1))
    assert ops["norm_1.scaled"].saved == ops["q.lora_dropped"].saved == ops["q"].backward == ()
    assert [k.layout for k in ops["q.lora_a"].backward if isinstance(k, Gemm)] == ["nt"]
    assert [op.backward for op in lowest.ops[-5:]] == [op.backward for op in usual.ops[-5:]]
    stream, wide = 512 * LLAMA.d_model, LLAMA.q_width + 2 * LLAMA.kv_width
    products = 2 * stream * (wide + 3 * 8)  # of q, k and v, and their pairs' first
    assert usual.backward_flop - lowest.backward_flop == products


def test_dora_keeps_both_results_and_its_vectors() -> None:
    """peft, tuners/lora/dora.py: the layer's result and the pair's for the magnitudes' gradient; norms and two factors a row."""
    saved = {}
    for method in ("lora", "dora"):
        block = build_blocks(LLAMA, Stack.load("transformers-2024"), lora(peft=method, lora_targets="down")).layer
        saved[method] = block.saved_bytes
    assert saved["dora"] - saved["lora"] == 2 * (2 * 512 + 3) * LLAMA.d_model


def test_all_but_what_is_frozen_is_trained() -> None:
    plan = Plan(freeze_modules="embedding,attention.*", **ALONE)
    held = LLAMA.vocab_size * LLAMA.d_model
    held += LLAMA.num_layers * sum(prod(s) for n, s in LLAMA.parameter_shapes("layer") if n.startswith("attention."))
    assert trained_numel(LLAMA, plan) == LLAMA.num_parameters - held
    assert frozen_bytes(LLAMA, plan) == 2 * held


def test_stored_weights_to_the_byte() -> None:
    """bitsandbytes: 64 elements share an fp32 scale, 256 scales share one of their own where they are bytes."""
    numel = 4096 * 14336
    assert stored(numel, 4096, "nf4", 2) == (numel // 2, (numel // 64 * 4,))
    assert stored(numel, 4096, "nf4_double", 2) == (numel // 2, (numel // 64, numel // 64 // 256 * 4))
    assert stored(numel, 4096, "int8", 2) == (numel, (14336 * 4,))
    assert stored(numel, 4096, "compute", 2) == (2 * numel, ())


@pytest.mark.parametrize("base", ["compute", "nf4"])
def test_what_stays_between_steps(base: str) -> None:
    """Frozen weights as stored, adapters in the master dtype with AdamW's moments, no gradients of frozen ones."""
    plan = lora(base_weights=base, optimizer_dtype="bf16")
    held, count = resident_tensors(LLAMA, plan), trained_numel(LLAMA, plan)
    tensors = 2 * 7 * LLAMA.num_layers
    assert sum(held["parameters"]) == frozen_bytes(LLAMA, plan) + 2 * count
    assert sum(held["optimizer_state"]) == 2 * 2 * count + 4 * tensors
    assert sum(gradient_tensors(LLAMA, plan)) == 2 * count
    whole = LLAMA.num_parameters
    ends = 2 * LLAMA.vocab_size * LLAMA.d_model + (2 * LLAMA.num_layers + 1) * LLAMA.d_model
    wanted = 2 * whole if base == "compute" else 2 * ends + (whole - ends) // 2 + (whole - ends) // 64 * 4
    assert frozen_bytes(LLAMA, plan) == wanted


@pytest.mark.parametrize("whose", ["fsdp1", "fsdp2", "deepspeed"])
def test_frozen_weights_are_gathered_and_never_reduced(whose: str) -> None:
    plan = Plan(peft="lora", zero=3, dp_shard=8, data_parallel=whose, reduce_dtype="bf16")
    layer = next(one for one in communication(LLAMA, plan) if one.unit == "layer0")
    still = sum(prod(shape) for _, shape in LLAMA.parameter_shapes("layer"))
    pairs = sum(prod(shape) for _, shape in trained(LLAMA, "layer", plan))
    assert layer.all_gather_forward_bytes == layer.all_gather_backward_bytes == 2 * (still + pairs)
    assert layer.reduce_scatter_bytes == 2 * pairs
    ends = [one for one in communication(LLAMA, plan) if one.unit in ("embedding", "head")]
    assert sum(one.reduce_scatter_bytes for one in ends) == 0
    assert sum(unit.shard_numel for unit in units(LLAMA, plan)) * 8 == trained_numel(LLAMA, plan)


def test_no_products_for_gradients_of_frozen_weights() -> None:
    stack = Stack.load("transformers-2024")
    ops = {op.name: op for op in build_blocks(LLAMA, stack, lora()).layer.ops}
    assert [k.layout for k in ops["gate"].backward if isinstance(k, Gemm)] == ["nn"]
    assert ops["gate"].saved == ()
    assert [k.layout for k in ops["gate.lora_a"].backward if isinstance(k, Gemm)] == ["nn", "nt"]
    narrow = {op.name: op for op in build_blocks(LLAMA, stack, lora(peft="qlora")).layer.ops}
    weight = LLAMA.d_model * LLAMA.d_ff
    assert narrow["gate"].forward_temporary_bytes == narrow["gate"].backward_temporary_bytes == 2 * weight
    dequantised = [k for k in narrow["gate"].backward if not isinstance(k, Gemm)]
    assert max(k.num_bytes for k in dequantised) == weight // 2 + weight // 64 + 2 * weight


def test_model_flop_of_frozen_matrices_are_four_a_token() -> None:
    full, tuned = (model_flop(LLAMA, plan) for plan in (Plan(**ALONE), lora()))
    assert full - tuned == 2 * LLAMA.num_matmul_parameters * 512


def test_gradients_of_ops_are_those_of_the_parameters() -> None:
    """Whatever is trained, a block's ops make exactly the gradients of its parameters."""
    stack = Stack.load("transformers-2024")
    plans = [lora(), lora(peft="dora"), lora(peft="ia3"), lora(peft="prefix"), lora(train_modules="norms,lm_head"),
             Plan(freeze_modules="mlp", **ALONE), lora(master_dtype="fp32"), lora(lora_dropout=0.1)]  # fmt: skip
    for plan in plans:
        blocks = build_blocks(LLAMA, stack, plan)
        for part, block in (("embedding", blocks.embedding), ("layer", blocks.layer), ("head", blocks.head)):
            made = sum(op.parameter_numel for op in block.ops)
            assert made == sum(prod(shape) for _, shape in trained(LLAMA, part, plan)), (plan.peft, part)  # type: ignore[arg-type]


def test_prefixes_stand_ahead_of_keys_whatever_projects_them() -> None:
    """GPT-2 projects Q, K and V together (peft: 12 layers × 20 tokens × 2 × 768); latent attention has no such keys."""
    gpt2, plan = Model.load("gpt2"), lora(peft="prefix", prefix_tokens=20)
    assert trained_numel(gpt2, plan) == 12 * 20 * 2 * 768
    made = sum(op.parameter_numel for op in build_blocks(gpt2, Stack.load("transformers-2024"), plan).layer.ops)
    assert made == 20 * 2 * 768
    with pytest.raises(PlanError, match="no layer of the model projects keys and values"):
        predict(Model.load("deepseek-v2-lite"), plan, Cluster.synthesise("a100-80gb", 1))


def test_steps_and_memory_shrink() -> None:
    """LoRA's step takes less than a full one's where the GPU sets the pace, and QLoRA's weights a third of LoRA's."""
    cluster, model = Cluster.synthesise("a100-80gb", 1), Model.load("llama3.2-1b")
    of = {}
    for peft in ("full", "lora", "qlora"):
        plan = Plan(peft=peft, recompute="full", stack="transformers-2024", **{**ALONE, "seq_len": 4096})
        of[peft] = predict(model, plan, cluster)
    assert of["lora"].step_s < of["full"].step_s
    assert of["qlora"].memory.resident_bytes < of["lora"].memory.resident_bytes < of["full"].memory.resident_bytes
    assert of["lora"].step_s < of["qlora"].step_s


def test_losses_of_transformers_hold_what_its_code_holds() -> None:
    """Bytes a logit at the loss: 16-bit logits, their cast, the copy without last rows, log-probabilities; Liger none.

    `shifted`: all of it in 16 bits; `shifted_nll`: and the log-probabilities once more, as autocast casts them for nll_loss.
    """
    held = {
        "fp32_shifted": 14,
        "fp32_cast": 12,
        "fp32_shifted_fused": 10,
        "fp32_cast_fused": 8,
        "shifted": 6,
        "shifted_nll": 10,
    }
    plan = lora(seq_len=4096, recompute="full")
    logits = 4096 * LLAMA.vocab_size
    for loss, count in held.items():
        stack = Stack.load("transformers-2024").copy_with(loss=loss)
        block = build_blocks(LLAMA, stack, plan).head
        tape = record(block, ends_forward=True)
        live, most, sizes = 0, 0, {}
        for slot, size, *_ in tape.forward.events:
            sizes |= {slot: size} if size >= 0 else {}
            live += size if size >= 0 else -sizes.get(slot, 0)
            most = max(most, live)
        assert most // logits == count, loss
    stack = Stack.load("transformers-2024").copy_with(loss="fused_linear")
    liger = next(op for op in build_blocks(LLAMA, stack, plan).head.ops if op.name == "linear_cross_entropy")
    assert [tensor.num_bytes for tensor in liger.outputs] == [4, 2 * 4096 * LLAMA.d_model]
    assert liger.forward_temporary_bytes == 2 * 128 * LLAMA.vocab_size  # 4,096 rows in chunks of 2^7: V / D is 31.3


def test_cut_cross_entropy_makes_its_logits_twice_and_keeps_none() -> None:
    """A product forward, two backward for a frozen head and three for a trained one; a row's log-sum-exp stays."""
    logits = 2 * 4096 * LLAMA.vocab_size * LLAMA.d_model
    stack = Stack.load("transformers-2024").copy_with(loss="cut")
    for plan, backward in ((lora(seq_len=4096), 2), (Plan(zero=0, data_parallel="ddp", seq_len=4096), 3)):
        op = next(op for op in build_blocks(LLAMA, stack, plan).head.ops if op.name == "cut_cross_entropy")
        assert sum(kernel.flop for kernel in op.forward) == logits
        assert sum(kernel.flop for kernel in op.backward) == backward * logits
        assert [tensor.num_bytes for tensor in op.outputs] == [4, 4 * 4096]
        assert op.forward_temporary_bytes == 0


def test_documents_in_a_sequence_attend_to_themselves() -> None:
    """Pairs of a causal mask: 16 documents of 512 tokens are those of 16 sequences, and so is the step's attention."""
    packed, alone = lora(seq_len=8192, document_len=512), lora(seq_len=512, micro_batch_size=16)
    flop = [
        sum(
            kernel.flop
            for op in build_blocks(LLAMA, Stack.of(plan), plan).layer.ops
            for kernel in op.forward
            if op.name == "attention"
        )
        for plan in (packed, alone, lora(seq_len=8192))
    ]
    assert flop[0] == flop[1] == flop[2] // 16
    assert model_flop(LLAMA, packed) == model_flop(LLAMA, alone)
    with pytest.raises(PlanError, match="longer than the sequence of 512"):
        check(lora(seq_len=512, document_len=1024))


def test_fsdp1_keeps_the_inputs_of_frozen_layers_to_the_end_of_the_backward() -> None:
    """Re-entrant checkpoints: each layer's input and its gradient stay, so live bytes grow by both at every layer."""
    model, device = Model.load("llama3.2-1b"), Cluster.synthesise("a100-80gb", 2).device
    peaks = {}
    for early_stop in (False, True):
        stack = Stack.load("transformers-2024").copy_with(early_stop=early_stop, loss="fused_linear")
        plan = lora(zero=3, dp_shard=2, data_parallel="fsdp1", seq_len=4096, micro_batch_size=4, recompute="full")
        blocks = build_blocks(model, stack, plan)
        peaks[early_stop] = simulate_memory(model, plan, stack, blocks, device, quick=True)[0].peak_allocated_bytes
    stream = 4 * 4096 * model.d_model * 2
    assert peaks[False] - peaks[True] > (model.num_layers - 3) * stream


def test_fsdp1_makes_gradients_of_all_that_shares_a_vector_with_something_trained() -> None:
    """Pairs in their layer's unit: autograd sees one vector a layer; the root, all frozen, has none."""
    mixed = lora(data_parallel="fsdp1", zero=3, dp_shard=4, lora_rank=8, lora_targets="q,v", mixed_units=True)
    layer = sum(prod(shape) for _, shape in LLAMA.parameter_shapes("layer"))
    pairs = 8 * (2 * LLAMA.d_model + LLAMA.d_model + LLAMA.kv_width)
    root, *layers = units(LLAMA, mixed)
    assert (root.shapes, {one.padded_numel for one in layers}) == ((), {layer + pairs})
    assert gradient_tensors(LLAMA, mixed) == [2 * (layer + pairs) // 4] * LLAMA.num_layers
    apart, held = resident_tensors(LLAMA, mixed.copy_with(mixed_units=False)), resident_tensors(LLAMA, mixed)
    assert held == apart  # the optimizer steps the pairs alone
    stack = Stack.load("transformers-2024")
    flop = {
        way: build_blocks(LLAMA, stack, mixed.copy_with(mixed_units=way)).layer.backward_flop for way in (True, False)
    }
    weights = sum(prod(shape) for _, shape in LLAMA.parameter_shapes("layer") if len(shape) > 1)
    assert flop[True] - flop[False] == 2 * weights * mixed.seq_len
    whole = mixed.copy_with(num_micro_batches=2, sync_every_micro_batch=False)
    device, peaks = Cluster.synthesise("a100-80gb", 4).device, {}
    for plan in (mixed, whole):
        blocks = build_blocks(LLAMA, stack, plan)
        peaks[plan] = simulate_memory(LLAMA, plan, stack, blocks, device, quick=True)[0].peak_allocated_bytes
    assert peaks[whole] - peaks[mixed] > 2 * (LLAMA.num_layers - 2) * layer * 3 // 4
    with pytest.raises(PlanError, match="share no flat vector"):
        check(mixed.copy_with(peft="qlora"))


def test_a_vector_of_fsdp1_has_one_dtype_and_a_trained_head_wakes_the_layers_below() -> None:
    plan = Plan(data_parallel="fsdp1", zero=3, dp_shard=4, freeze_modules="embedding,layers.0-9")
    assert {one.size for one in frozen(LLAMA, "embedding", plan)} == {4 * LLAMA.vocab_size * LLAMA.d_model}
    assert sum(one.size for one in frozen(LLAMA, "layer@0", plan)) == 2 * sum(
        prod(shape) for _, shape in LLAMA.parameter_shapes("layer")
    )
    assert [one.name for one in build_blocks(LLAMA, Stack.load("transformers-2024"), plan).body] == [
        "layer@0",
        "layer@10",
    ]


@pytest.mark.parametrize(("targets", "columns"), [("q,v", 4096 + 4096), ("v", 4096), ("q,k,v", 0)])
def test_what_adapts_some_of_a_joint_product_is_kept_where_it_is_copied(targets: str, columns: int) -> None:
    """LitGPT's index_copy keeps its source (torch, derivatives.yaml), which is none where Q, K and V all have pairs."""
    model = Model.load("llama2-7b").model_copy(update={"fused_qkv": True})
    plan = lora(lora_targets=targets, seq_len=512)
    copied, beside = (
        build_blocks(model, Stack.load("litgpt-2024").copy_with(adapters=way), plan).layer.saved_bytes
        for way in ("copied", "operators")
    )
    assert copied - beside == 512 * columns * 2


def test_chunks_of_the_head_hold_256_rows_of_logits_and_widen_the_weight_for_each() -> None:
    """trl/trainer/sft_trainer.py: _chunk, without a gradient of a frozen head."""
    stack = Stack.load("transformers-2024").copy_with(loss="chunked")
    head, whole = (
        build_blocks(LLAMA, stack, plan).head for plan in (lora(seq_len=1000), Plan(**{**ALONE, "seq_len": 1000}))
    )
    (op,) = (one for one in head.ops if one.name == "chunked_cross_entropy")
    weight, chunk = LLAMA.vocab_size * LLAMA.d_model, 4 * 256 * LLAMA.vocab_size
    assert op.forward_temporary_bytes == (4 + 2) * weight  # both copies, before there are logits
    assert 2 * weight + 4 * chunk < op.backward_temporary_bytes == 6 * weight
    assert [k.numel for k in op.forward if isinstance(k, Stream) and k.op in ("widen", "cast")][:2] == [4 * weight] * 2
    products = {(k.m, k.n, k.k, k.batch) for k in op.backward if isinstance(k, Gemm)}
    assert products == {(256, LLAMA.vocab_size, LLAMA.d_model, 4), (256, LLAMA.d_model, LLAMA.vocab_size, 4)}
    assert whole.backward_flop - head.backward_flop == 2 * 4 * 256 * weight
    assert head.saved_bytes < 3 * 1000 * LLAMA.d_model * 4  # no logits


def test_gradients_go_where_the_optimizer_steps_in_the_backward() -> None:
    plan = Plan(optimizer_in_backward=True, optimizer_dtype="bf16", **ALONE)
    assert gradient_tensors(LLAMA, plan) == []
    with pytest.raises(PlanError, match="as they appear"):
        check(plan.copy_with(num_micro_batches=2))


def test_weights_that_torch_unpacks_stay_for_the_backward() -> None:
    stack = Stack.load("transformers-2024").copy_with(dequantised="operators")
    ops = {op.name: op for op in build_blocks(LLAMA, stack, lora(peft="qlora", base_weights="gptq")).layer.ops}
    numel = LLAMA.d_model * LLAMA.d_ff
    unpacked = [k for k in ops["gate"].forward if not isinstance(k, Gemm)]
    assert len(unpacked) == 4 + 5  # of the zeros, one a group of 128, and of the weight
    assert sum(k.num_bytes for k in unpacked) == numel // 128 * 27 // 2 + numel * 33 // 2
    assert not any(k.num_bytes > numel for k in ops["gate"].backward if not isinstance(k, Gemm))
    assert "gate.dequantised" in ops["gate"].saved


def test_pairs_in_fp32_beside_modules_in_16_bits() -> None:
    """peft leaves `modules_to_save` in the model's dtype and its pairs in fp32: two bytes more each of weight, gradient and moments."""
    narrow = lora(lora_targets="attention", train_modules="lm_head", optimizer_dtype="bf16")
    wide = narrow.copy_with(adapter_master_dtype="fp32")
    pairs = trained_numel(LLAMA, lora(lora_targets="attention"))
    assert trained_numel(LLAMA, wide) == trained_numel(LLAMA, narrow) == pairs + LLAMA.vocab_size * LLAMA.d_model
    held, less = (resident_tensors(LLAMA, plan) for plan in (wide, narrow))
    assert sum(held["parameters"]) - sum(less["parameters"]) == 2 * pairs
    assert sum(held["optimizer_state"]) - sum(less["optimizer_state"]) == 4 * pairs
    assert sum(gradient_tensors(LLAMA, wide)) - sum(gradient_tensors(LLAMA, narrow)) == 2 * pairs
    saved = [
        saving(LLAMA, plan, Cluster.synthesise("a100-80gb", 1), Checkpoint()).state_bytes for plan in (wide, narrow)
    ]
    assert saved[0] - saved[1] == 6 * pairs
    ops = {
        plan: {op.name: op for op in build_blocks(LLAMA, Stack.load("transformers-2024"), plan).layer.ops}
        for plan in (wide, narrow)
    }
    assert {"q.lora_x", "q.lora_a.weight"} <= ops[wide].keys() - ops[narrow].keys()
    made = {plan: sum(op.parameter_numel for op in found.values()) for plan, found in ops.items()}
    assert made[wide] == 2 * made[narrow] == 2 * pairs // LLAMA.num_layers  # in elements of 16 bits
    with pytest.raises(PlanError, match="each GPU holds whole modules"):
        check(wide.copy_with(zero=3, dp_shard=2, data_parallel="fsdp2"))


def test_fused_pairs_behind_dropout_add_and_mask_in_kernels_of_their_own() -> None:
    """fms-acceleration's LoRA_W: x dropped and kept; Y + X' A B; dX + (X' != 0) * (dY B A). Bytes in 16 bits, T tokens."""
    stack = Stack.load("transformers-2024").copy_with(adapters="fused")
    made = {}
    for dropout in (0.0, 0.1):
        plan = lora(lora_targets="down", lora_dropout=dropout)
        made[dropout] = next(op for op in build_blocks(LLAMA, stack, plan).layer.ops if op.name == "down")
    plain, op = made[0.0], made[0.1]
    wide, narrow = 512 * LLAMA.d_ff, 512 * LLAMA.d_model

    def moved(kernels: Any) -> int:
        return sum(k.num_bytes for k in kernels if not isinstance(k, Gemm))

    assert moved(op.forward) - moved(plain.forward) == 5 * wide + (6 - 2) * narrow
    assert moved(op.backward) - moved(plain.backward) == (3 + 5 + 6) * wide
    assert set(op.saved) - set(plain.saved) == {"down.lora_dropped"}


def test_upcast_streams_are_cast_around_quantised_layers() -> None:
    """prepare_model_for_kbit_training: the stream is fp32 under autocast, and Linear4bit's results are fp32 again."""
    stack = Stack.load("transformers-2024")
    plain = lora(peft="qlora", master_dtype="fp32", lora_targets="q")
    made = {}
    for upcasts in (False, True):
        blocks = build_blocks(LLAMA, stack, plain.copy_with(upcast_frozen=upcasts))
        made[upcasts] = {tensor.name: tensor.num_bytes for op in blocks.layer.ops for tensor in op.outputs}
        made[upcasts]["stream"] = blocks.layer.input_bytes
    assert made[True]["stream"] == 2 * made[False]["stream"] == 4 * 512 * LLAMA.d_model
    assert made[True]["gate.widened"] == 2 * made[True]["gate"]
    assert "gate.widened" not in made[False]
    ends = LLAMA.vocab_size * LLAMA.d_model * 2 + (2 * LLAMA.num_layers + 1) * LLAMA.d_model
    plans = (plain.copy_with(upcast_frozen=upcasts) for upcasts in (False, True))
    plain_bytes, upcast_bytes = (frozen_bytes(LLAMA, plan) for plan in plans)
    assert upcast_bytes - plain_bytes == 2 * ends


def test_frozen_weights_in_fp32_are_cast_by_each_product_and_kept_for_its_backward() -> None:
    """Autocast caches casts of leaves that need gradients alone; F.linear saves the 16-bit weight that it multiplied with."""
    stack = Stack.load("transformers-2024")
    narrow = lora(master_dtype="fp32", lora_targets="q")
    wide = narrow.copy_with(base_weights="fp32")
    matrices = sum(prod(shape) for part in LLAMA.body for name, shape in LLAMA.parameter_shapes(part) if len(shape) > 1)
    assert frozen_bytes(LLAMA, wide) - frozen_bytes(LLAMA, narrow) == 2 * matrices
    (op,) = (op for op in build_blocks(LLAMA, stack, wide).layer.ops if op.name == "gate")
    (plain,) = (op for op in build_blocks(LLAMA, stack, narrow).layer.ops if op.name == "gate")
    numel = LLAMA.d_model * LLAMA.d_ff
    assert op.saved == ("gate.dequantised",)  # and not the input: no gradient of the weight
    assert [tensor.num_bytes for tensor in op.outputs if tensor.name == "gate.dequantised"] == [2 * numel]
    assert plain.saved == ()
    cast = next(kernel for kernel in op.forward if not hasattr(kernel, "m"))
    assert (cast.op, cast.read_bytes, cast.write_bytes) == ("cast", 4 * numel, 2 * numel)
    assert op.backward == plain.backward
    assert op.forward_temporary_bytes == plain.forward_temporary_bytes
    single = wide.copy_with(precision="fp32")
    (computed,) = (op for op in build_blocks(LLAMA, stack, single).layer.ops if op.name == "gate")
    assert computed.saved == ()


def test_boards_that_their_power_does_not_hold_sustain_more() -> None:
    """GeForce boards multiply at half rate where sums are fp32, and so sustain it; an L40S does not sustain its peak."""
    share = {}
    for name in ("rtx-4090", "l40s"):
        device = Device.load(name)
        gemm = Gemm(m=16384, n=8192, k=8192, dtype="bf16")
        share[name] = gemm.flop / (Calibration.for_device(device).timer(device).kernel_s(gemm) * device.peak("bf16"))
    assert share["l40s"] < 0.6
    assert 0.85 < share["rtx-4090"] < 0.92


def test_thin_fp32_products_cost_about_their_bytes() -> None:
    """A pair in fp32 beside the tensor cores: within three times what its operands take to be read."""
    device = Device.load("a100-sxm4-80gb")
    timer = Calibration.for_device(device).timer(device)
    for m, n, k in ((16384, 16, 4096), (16384, 4096, 16)):
        moved_s = 4 * (m * k + k * n + m * n) / device.memory_bytes_per_s
        assert moved_s < timer.kernel_s(Gemm(m=m, n=n, k=k, dtype="fp32")) < 3.3 * moved_s


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"base_weights": "nf4"}, "weights that are trained are not stored as nf4"),
        ({"peft": "qlora", "base_weights": "compute"}, "beside quantised weights"),
        ({"train_modules": "lm_head"}, "all modules are trained"),
        ({"peft": "lora", "freeze_modules": "mlp"}, "all modules are frozen"),
        ({"peft": "qlora", "precision": "fp8"}, "not modelled"),
        ({"peft": "lora", "lora_targets": "layers.5-3.q"}, "layers from 5 to 3"),
        ({"freeze_modules": "layers.0-1.mlp:8"}, "a rank is of pairs"),
        ({"peft": "lora", "lora_targets": "layers.2.qq"}, "names no module"),
        ({"peft": "lora", "lora_targets": "mlp:0"}, "rank of 0"),
    ],
)
def test_what_contradicts_itself_is_refused(fields: dict[str, str], says: str) -> None:
    with pytest.raises((PlanError, ValueError), match=says):
        check(Plan(**fields))  # type: ignore[arg-type]


def test_layers_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(PlanError, match="layer 40 of a model of 32"):
        check_split(lora(lora_targets="layers.20-40.q"), LLAMA, Cluster.synthesise("a100-80gb", 1))


def test_unknown_modules_are_named() -> None:
    with pytest.raises(ValueError, match="names no module"):
        Plan(peft="lora", lora_targets="q_prj")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("lora", {"r": 8, "target_modules": ["q_proj", "v_proj"]}),
        ("lora", {"r": 16, "target_modules": "all-linear"}),
        ("dora", {"r": 4, "target_modules": ["k_proj", "down_proj"], "use_dora": True}),
        ("lora", {"r": 8, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 2]}),
        ("lora", {"r": 8, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": 1, "modules_to_save": ["lm_head"]}),
        ("lora", {"r": 8, "target_modules": "all-linear", "modules_to_save": ["embed_tokens", "lm_head"],
                  "rank_pattern": {"q_proj": 32, "layers.1.mlp.down_proj": 4, r".*layers\.[02]\.self_attn\.(k|v)_proj": 2}}),
        ("lora", {"r": 8, "target_modules": r"model\.layers\.[12]\..*(up|q)_proj"}),
        ("ia3", {}),
    ],
)  # fmt: skip
def test_counts_are_pefts_own(method: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    """Exact, by building the adapters on a small Llama without storage."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tests.programs import with_torchvision  # noqa: F401  transformers asks for it

    peft = pytest.importorskip("peft")
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=1000, tie_word_embeddings=False)
    with torch.device("meta"):
        whole = transformers.LlamaForCausalLM(config)
    kind = peft.IA3Config if method == "ia3" else peft.LoraConfig
    tuned = peft.get_peft_model(whole, kind(task_type="CAUSAL_LM", **arguments))
    counted = sum(p.numel() for p in tuned.parameters() if p.requires_grad)
    model = Model.parse(
        {"name": "small", "family": "llama", "num_layers": 3, "d_model": 256, "num_heads": 8, "num_kv_heads": 2,
         "d_ff": 768, "vocab_size": 1000, "max_positions": 512},
        "small",
        ModelError,
    )  # fmt: skip
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "IA3" if method == "ia3" else "LORA", **arguments}))
    flags = {flag: int(text) if text.isdigit() else text for flag, text in read_adapter_config(file).items()}
    assert trained_numel(model, lora(**flags)) == counted


def test_a_recipe_sets_what_such_runs_set_under_other_flags(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--recipe", "qlora", "--model", "llama3.2-1b", "--gpus", "1xrtx4090", "--seq-len", "512", "--json"]
    assert main(["predict", *asked]) == 0
    plan = json.loads(capsys.readouterr().out)["inputs"]["plan"]
    said = {name: plan[name] for name in ("peft", "base_weights", "seq_len", "recompute", "zero", "data_parallel")}
    assert said == {
        "peft": "qlora", "base_weights": None, "seq_len": 512, "recompute": "full", "zero": 0, "data_parallel": "ddp"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["--recipe", "lra"], "did you mean lora"),
        (["--recipe", "DPO"], "--reference base"),
        (["--recipe", "grpo"], "--rollout FILE"),
        (["--stack", "unsloth"], "transformers-2024, which describes that software"),
        (["--offload", "optimizer=host"], "--set plan.offload.KEY=VALUE"),
        (["--gpus", "8xh100", "--cluster", "dgx-h100-8"], "--cluster is given too"),
        (["--gpus", "h100"], "no COUNTxGPU"),
        (["--cluster", "0xh100"], "0 GPUs"),
    ],
)
def test_what_a_recipe_or_a_count_cannot_be_is_told(
    asked: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", *asked]) == 3
    assert says in capsys.readouterr().err


def test_a_gpu_without_bf16_trains_in_fp16_where_nobody_says_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["predict", "--recipe", "lora", "--model", "llama3.2-1b", "--gpus", "2xt4"]
    assert main([*asked, "--json"]) in (0, 4)
    assert json.loads(capsys.readouterr().out)["inputs"]["plan"]["precision"] == "fp16"
    assert main(asked) in (0, 4)
    assert "precision = fp16, as none was given and the GPU has no bf16" in capsys.readouterr().out
    assert main([*asked, "--precision", "bf16"]) == 3
    error = capsys.readouterr().err
    assert "t4 has no bf16 matrix units" in error
    assert 'precision = "fp32" or "fp16"' in error


def test_remedies_of_a_full_fine_tune_name_adapters_and_those_of_training_do_not() -> None:
    cluster, stack = Cluster.synthesise("h100", 8), Stack.load("transformers-2024")
    kinds = {
        peft: [one.kind for one in changes(Plan(peft=peft, dp_shard=8), cluster, stack)] for peft in ("full", "none")
    }  # type: ignore[arg-type]
    assert set(kinds["full"]) - set(kinds["none"]) == {"adapters", "4-bit adapters", "shorter sequences", "loss"}


def test_checkpoints_hold_what_is_trained() -> None:
    cluster, asked = Cluster.synthesise("a100-80gb", 1), Checkpoint()
    full, tuned = (saving(LLAMA, plan, cluster, asked).state_bytes for plan in (Plan(**ALONE), lora()))
    assert full * trained_numel(LLAMA, lora()) == tuned * LLAMA.num_parameters


def test_offloaded_frozen_weights_come_up_as_stored_and_send_nothing_back() -> None:
    """FSDP1 with CPUOffload: a layer's NF4 weights and bf16 adapters go up before each gather; adapters' gradients go down."""
    away = {"offload": {"optimizer": "host", "parameters": "host"}}
    plan = Plan(**{"peft": "qlora", "dp_shard": 2, "zero": 3, "data_parallel": "fsdp1", "master_dtype": "bf16", **away})
    layer = moves(LLAMA, plan, {}).units["layer0"]
    pairs = sum(prod(shape) for _, shape in trained(LLAMA, "layer", plan))
    still = sum(-(-one.size // 2) for one in frozen(LLAMA, "layer", plan))
    assert layer.fetch_forward_bytes == layer.fetch_backward_bytes == still + 2 * pairs // 2
    assert layer.gradient_bytes == 2 * pairs // 2
    assert tier_usage(LLAMA, plan).host["frozen_weights"] > LLAMA.num_layers * still


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1},
         {"peft": "lora", "lora_rank": "8", "lora_targets": "q_proj,v_proj", "lora_dropout": "0.1"}),
        ({"peft_type": "LORA", "use_dora": True, "target_modules": "all-linear"},
         {"peft": "dora", "lora_rank": "8", "lora_targets": "all-linear"}),
        ({"peft_type": "LORA", "r": 32, "target_modules": None}, {"peft": "lora", "lora_rank": "32", "lora_targets": "q,v"}),
        ({"peft_type": "LORA", "target_modules": ["q_proj"], "layers_to_transform": [3, 0, 1], "rank_pattern": {"q_proj": 4}},
         {"peft": "lora", "lora_rank": "8", "lora_targets": "layers.0-1.q_proj:4,layers.3.q_proj:4,layers.0-1.q_proj,layers.3.q_proj"}),
        ({"peft_type": "LORA", "target_modules": r".*\.([3-9]|\d\d+)\.self_attn\.q_proj"},
         {"peft": "lora", "lora_rank": "8", "lora_targets": "layers.3-.q_proj"}),
        ({"peft_type": "LORA", "target_modules": "all-linear", "layers_to_transform": [-1]}, 1),
        ({"peft_type": "LORA", "target_modules": "all-linear", "layers_to_transform": [1], "layers_pattern": "towers"}, 2),
        ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 30}, {"peft": "prefix", "prefix_tokens": "30"}),
        ({"peft_type": "LORA", "r": "8", "rank_pattern": {"q": "4", "(a+)+$": 4}, "lora_dropout": []}, 4),
        ({"peft_type": "VERA"}, 1),
        ({"r": 8}, 1),
        ([], 1),
    ],
)  # fmt: skip
def test_pefts_file_is_read_or_every_fault_of_it_told(data: object, says: object, tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(data))
    if isinstance(says, dict):
        assert read_adapter_config(file) == says
        return
    with pytest.raises(InputError) as caught:
        read_adapter_config(file)
    assert len(caught.value.faults) == says


def test_adapters_stand_on_the_model_that_their_file_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless a flag says otherwise; a base that is no preset is an error, not the default."""
    file = tmp_path / "adapter_config.json"
    command = ["predict", "--recipe", str(file), "--gpus", "1xa100", "--seq-len", "256", "--json"]
    for base, more, name in (
        ("Qwen/Qwen2.5-0.5B", [], "qwen2.5-0.5b"),
        ("me/mine", ["--model", "gpt2"], "gpt2"),
        ("me/mine", [], None),
    ):
        file.write_text(json.dumps({"peft_type": "LORA", "r": 8, "base_model_name_or_path": base}))
        code = main([*command, *more])
        printed = capsys.readouterr()
        assert (code == 0) == (name is not None)
        assert name is None or json.loads(printed.out)["inputs"]["model"] == name
        assert name is not None or "base_model_name_or_path: me/mine is not a preset" in printed.err


def test_scales_stay_on_the_gpu_when_the_weights_leave() -> None:
    """bitsandbytes' quant_state is no parameter, which FSDP's CPUOffload moves: a byte for 64 elements, and four for 256 of these."""
    model = Model.load("llama2-7b")
    fields = {
        "dp_shard": 2,
        "data_parallel": "fsdp1",
        "peft": "qlora",
        "offload": {"optimizer": "host", "parameters": "host"},
    }
    matrices = [prod(shape) for _, shape in model.parameter_shapes("layer") if len(shape) > 1]
    scales = sum(numel // 64 + numel // 64 // 256 * 4 for numel in matrices) * model.num_layers
    assert sum(resident_tensors(model, Plan.model_validate(fields))["parameters"]) == scales


def test_paged_states_leave_the_gpu_only_where_it_is_full() -> None:
    """bitsandbytes (optim/optimizer.py: get_state_buffer): unified memory from 100,000 elements on; pages cross at half the link's rate."""
    model = Model.load("llama3.2-3b")
    fields: dict[str, Any] = {**ALONE, "recompute": "full", "stack": "transformers-2024"}
    plans = {kind: Plan(**fields, optimizer=kind) for kind in ("adamw", "paged_adamw")}
    paged = sum(resident_tensors(model, plans["paged_adamw"])["optimizer_state"])
    small = sum(prod(shape) for part in ("embedding", *model.body, "head") for _, shape in model.parameter_shapes(part) if prod(shape) < 100_000)  # type: ignore[arg-type]  # fmt: skip
    assert (paged, paged_bytes(model, plans["paged_adamw"])) == (8 * small, 8 * (model.num_parameters - small))
    assert paged_bytes(model, plans["adamw"]) == 0
    roomy, tight = Cluster.synthesise("a100-80gb", 1), Cluster.synthesise("rtx-3090", 1)
    of = {(kind, room.name): predict(model, plan, room) for kind, plan in plans.items() for room in (roomy, tight)}
    assert "paging" not in of["paged_adamw", roomy.name].breakdown
    assert of["paged_adamw", roomy.name].memory.host_bytes == 8 * (model.num_parameters - small)
    found = of["paged_adamw", tight.name]
    assert not of["adamw", tight.name].memory.fit.runs
    assert found.memory.fit.runs
    out = found.memory.used_bytes + 8 * (model.num_parameters - small) - found.memory.capacity_bytes
    tier = tight.host_tier
    assert tier is not None
    assert found.breakdown["paging"] == pytest.approx(2 * out * (1 / tier.h2d_bytes_per_s + 1 / tier.d2h_bytes_per_s))
    assert sum(found.breakdown.values()) == pytest.approx(found.step_s)


@pytest.mark.parametrize("pattern", [r"(\w|\w)*x", ".*.*.*.*.*.*x", "[a-z.]*[a-z.]*[a-z.]*[a-z.]*[a-z.]*!"])
def test_patterns_that_take_for_ever_match_nothing(pattern: str) -> None:
    """Or the test does not end either."""
    assert matched(pattern) == ()


def test_fsdp1_counts_adapters_among_the_units_that_are_gathered() -> None:
    """torch/distributed/fsdp, _limiter_utils.py and _exec_order_utils.py: two frees in flight, and ahead is what ran before."""
    chunk = Chunk(num_layers=4)
    order = FSDP1.order(lora())
    ways = {
        ("all",): (
            (3, 2),
            ((3, 4),),
        ),  # behind the MLP's pairs: the layer before has run; and none of the layer below ahead
        ("attention",): ((3, 1), ((3, 4),)),  # the MLP runs behind the last pairs
        ("mlp",): ((3, 2), ((2, 4),)),  # the layer below is sent for before this one's attention
    }
    for targets, (forward, backward) in ways.items():
        plan = lora(data_parallel="fsdp1", zero=3, dp_shard=2, lora_targets=targets)
        assert order.forward_gathers(plan, chunk, 3) == (forward,), targets
        assert order.backward_gathers(plan, chunk, 3) == backward, targets
    plain = Plan(data_parallel="fsdp1", zero=3, dp_shard=2)
    assert order.forward_gathers(plain, chunk, 3) == ((3, 1),)
    assert order.backward_gathers(plain, chunk, 3) == ((2, 4),)


@pytest.mark.parametrize("far", [1, 2, 64])
@pytest.mark.parametrize("way", ["fsdp1", "fsdp2"])
def test_a_gather_ahead_waits_for_a_unit_that_has_run(way: str, far: int) -> None:
    """With pairs on the MLP, a gather one unit ahead waited for the unit that it was ahead of: a KeyError."""
    chunk = Chunk(num_layers=8)
    plan = lora(data_parallel=way, zero=3, dp_shard=2, forward_prefetch=far)
    for unit in range(chunk.num_units):
        for one, gate in {"fsdp1": FSDP1, "fsdp2": FSDP2}[way].order(plan).forward_gathers(plan, chunk, unit):
            assert one >= unit
            assert gate is None or gate < unit
