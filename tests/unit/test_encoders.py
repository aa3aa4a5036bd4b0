"""Models that attend both ways, or whose head tells classes apart: FLOP, what their ops hold, what they go with."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import ModelError, PlanError
from simulator.base.exit_codes import ExitCode
from simulator.base.kernels import Attention
from simulator.cli import main
from simulator.predict import predict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.peft import PeftPlan
from simulator.spec.software.stack import Stack
from simulator.work.ops import build_blocks
from simulator.work.ops.core import Block
from simulator.work.parameters import model_flop
from tests.configured import configured

CONFIGS: dict[str, dict[str, Any]] = {
    one["model"]: one["keys"]
    for one in tomllib.loads(
        (Path(__file__).parents[1] / "data" / "configs" / "families.toml").read_text(encoding="utf-8")
    )["config"]
}
EAGER = Stack.load("torch-2.6-eager")


def read(name: str, **keys: object) -> Model:
    return configured({**CONFIGS[name], **keys}, "config.json", "m")


BERT = read("google-bert/bert-base-uncased, masked tokens")
CLASSES = read("google-bert/bert-base-uncased, two classes")
MODERN = read("answerdotai/ModernBERT-base")
VIT = read("google/vit-base-patch16-224")
# (model, tokens): a sequence that each takes
MODELS = pytest.mark.parametrize(
    ("model", "seq_len"), [(BERT, 512), (CLASSES, 512), (MODERN, 1024), (VIT, 197)], ids=["bert", "classes", "modern", "vit"]
)  # fmt: skip


def of_attention(block: Block) -> list[Attention]:
    return [kernel for op in block.ops for kernel in (*op.forward, *op.backward) if isinstance(kernel, Attention)]


def test_masked_tokens_cost_all_pairs_and_the_head_s_own_product() -> None:
    """BERT-base, 512 tokens: 6 FLOP a matrix' element and token, 12 a channel and pair, of all s² pairs of 12 layers."""
    d, s, v = 768, 512, 30522
    matrices = 12 * (4 * d * d + 2 * d * 4 * d) + d * d + v * d
    assert BERT.model_flop_per_sequence(s) == 6 * matrices * s + 12 * 12 * s * s * d


def test_an_image_costs_its_patches_and_a_head_that_reads_one_token() -> None:
    """ViT-B/16: 196 patches of 3 × 16 × 16 numbers, 197 tokens in 12 layers, one token in the head of 1,000 classes."""
    d, s = 768, 197
    layers = 12 * (4 * d * d + 2 * d * 4 * d) * s
    assert VIT.model_flop_per_sequence(s) == 6 * (layers + 196 * 3 * 16 * 16 * d + 1000 * d) + 12 * 12 * s * s * d
    assert VIT.model_flop_per_sequence(s) / 6 == pytest.approx(
        17.58e9, rel=0.005
    )  # torchvision's vit_b_16: 17.56 GFLOPS


def test_half_of_a_window_lies_on_either_side() -> None:
    """ModernBERT: |i - j| <= 64 of 1,024 tokens is 128 s - 64² pairs; 7 of 22 layers see all."""
    s, near = 1024, sum(1 for i in range(1024) for j in range(1024) if abs(i - j) <= 64)
    band = 128 * s - 64 * 64
    assert MODERN.attention_pairs(s) == 7 * s * s + 15 * band
    assert band == pytest.approx(near, rel=0.01)
    assert "one of the layers" in MODERN.sources["not modelled"]  # the eighth


def test_attention_both_ways_does_twice_a_mask_s_flop_in_the_same_memory() -> None:
    causal = BERT.model_copy(update={"bidirectional": False})
    one, two = (build_blocks(model, EAGER, Plan(seq_len=512)) for model in (causal, BERT))
    assert [k.flop for k in of_attention(two.layer)] == [2 * k.flop for k in of_attention(one.layer)]
    assert [k.num_bytes for k in of_attention(two.layer)] == [k.num_bytes for k in of_attention(one.layer)]
    cluster = Cluster.load("dgx-h100-8")
    masked, whole = (
        predict(model, Plan(dp_shard=8, seq_len=512, micro_batch_size=32), cluster) for model in (causal, BERT)
    )
    assert whole.memory.peak_allocated_bytes == masked.memory.peak_allocated_bytes
    assert whole.step_s > masked.step_s


@MODELS
def test_ops_hold_all_parameters(model: Model, seq_len: int) -> None:
    """A tied head's product holds the embedding's matrix once more."""
    blocks = build_blocks(model, EAGER, Plan(seq_len=seq_len))
    held = {block.name: sum(op.parameter_numel for op in block.ops) for block in (blocks.embedding, *blocks.body, blocks.head)}  # fmt: skip
    tied = model.vocab_size * model.d_model if model.tied_embeddings else 0
    assert held["embedding"] == model.num_parameters_of("embedding")
    assert held["head"] == model.num_parameters_of("head") + tied
    assert held["layer"] == model.num_parameters_of("layer")


def test_a_head_of_classes_reads_one_token_a_sequence() -> None:
    """Its logits are a row a sequence, and pixels have no gradient."""
    blocks = build_blocks(VIT, EAGER, Plan(seq_len=197, micro_batch_size=4))
    logits = next(tensor for op in blocks.head.ops for tensor in op.outputs if tensor.name == "logits")
    assert logits.num_bytes == 4 * 1000 * 2
    assert not any(op.grad_inputs for op in blocks.embedding.ops if op.name == "pixels")
    product = next(op for op in blocks.embedding.ops if op.name == "embedding.patch")
    assert [kernel.layout for kernel in product.backward if hasattr(kernel, "layout")] == ["nt"]


@MODELS
@pytest.mark.parametrize(
    "plan",
    [
        {"dp_shard": 8},
        {"dp_shard": 8, "recompute": "full", "micro_batch_size": 4},
        {"dp_shard": 8, "precision": "fp8"},
        {"dp_replicate": 8, "zero": 0},
        {"dp_shard": 4, "tp": 2},
        {"dp_shard": 4, "pp": 2, "num_micro_batches": 2},
        {"dp_shard": 4, "tp": 2, "zero": 1, "data_parallel": "megatron"},
        {"dp_shard": 8, "data_parallel": "deepspeed"},
        {"dp_shard": 8, "peft": PeftPlan(method="lora", rank=8)},
        {"dp_shard": 8, "peft": PeftPlan(frozen=("embedding",))},
    ],
    ids=str,
)
def test_they_run_under_every_plan_of_a_decoder(model: Model, seq_len: int, plan: dict[str, Any]) -> None:
    made = Plan.parse({**plan, "seq_len": seq_len}, "plan", PlanError)
    found = predict(model, made, Cluster.load("dgx-h100-8"))
    assert 0 < found.step_s < 1
    assert found.fits
    assert found.model_flop_per_step == model_flop(model, made)


def test_labels_of_the_file_are_the_classes() -> None:
    assert read("google/vit-base-patch16-224", id2label={"0": "cat", "1": "dog", "2": "fox"}).num_classes == 3
    assert (CLASSES.num_classes, CLASSES.tied_embeddings, CLASSES.head_transform) == (2, False, "plain")


def test_what_such_a_model_does_not_go_with_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster.load("dgx-h100-8")
    for plan, said in (
        (Plan(dp_shard=8, seq_len=1024), "512 positions, and seq_len is 1024 (seq_len = 512 at most)"),
        (Plan(dp_shard=4, cp=2, seq_len=512), "sequences that ranks split"),
    ):
        with pytest.raises(PlanError) as found:
            predict(BERT, plan, cluster)
        assert said in str(found.value)
    with pytest.raises(PlanError, match=r"197 positions, and seq_len is 128 \(seq_len = 197\)"):
        predict(VIT, Plan(dp_shard=8, seq_len=128), cluster)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS["google-bert/bert-base-uncased, masked tokens"]))
    assert main(["serve", "--model", str(file), "--cluster", "dgx-h100-8"]) == ExitCode.BAD_INPUT
    assert "generates no tokens" in capsys.readouterr().err
    at = ["--model", str(file), "--cluster", "dgx-h100-8", "--seq-len", "512"]
    assert main(["export", *at, "--to", "megatron"]) == ExitCode.BAD_INPUT
    assert "bidirectional" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True, "d_model": 512, "num_layers": 6}, "'t5' is an encoder with a decoder"),
        ({"model_type": "mt5", "d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "vocab_size": 250112}, "'mt5' is an encoder with a decoder"),
        ({"model_type": "mllama_text_model", "cross_attention_layers": [3]}, "'mllama_text_model' is a decoder with layers that attend to images"),
        ({"model_type": "deberta-v2", "hidden_size": 768}, "products of relative positions"),
        ({"model_type": "bert", "position_embedding_type": "relative_key",
            "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 30522
        }, "relative positions inside attention are not modelled"),
    ],
    ids=["t5", "mt5", "mllama", "deberta", "relative"],
)  # fmt: skip
def test_models_of_other_kinds_are_refused_by_what_they_are(keys: dict[str, Any], said: str) -> None:
    """They would be read as a Llama of their sizes otherwise."""
    with pytest.raises(ModelError) as found:
        configured(keys, "config.json", "m")
    assert said in str(found.value)
    assert "--like llama" not in str(found.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"patch_numel": 768}, "patch_numel needs num_classes"),
        ({"num_classes": 2, "tied_embeddings": True}, "num_classes and tied_embeddings exclude each other"),
        ({"num_classes": 2, "mtp_layers": 1}, "num_classes and mtp_layers exclude each other"),
    ],
    ids=["patches", "tied", "mtp"],
)
def test_contradictions_of_a_head_are_faults(fields: dict[str, Any], said: str) -> None:
    sizes = {"name": "m", "num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 128, "vocab_size": 512}
    with pytest.raises(ModelError, match=said):
        Model.parse({**sizes, **fields}, "model.toml", ModelError)


def test_no_label_of_an_encoder_is_shifted() -> None:
    """transformers' ForCausalLMLoss widens logits and copies them without the last row; an encoder's loss takes them as they are."""
    stack = Stack.load("transformers-2024").copy_with(loss="fp32_shifted")
    names = [{op.name for op in build_blocks(model, stack, Plan(seq_len=512)).head.ops} for model in (BERT, CLASSES)]
    causal = build_blocks(BERT.model_copy(update={"bidirectional": False}), stack, Plan(seq_len=512)).head.ops
    assert "logits.shifted" in {op.name for op in causal}
    assert not any("logits.shifted" in one or "logits.float" in one for one in names)
