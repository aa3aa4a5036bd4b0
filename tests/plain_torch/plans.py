"""The plans that are compared: each way to spread a small model that fake tensors play, on each device."""

from __future__ import annotations

from typing import Any, Final

from simulator.base.errors import ModelError
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from validate.task import Task

_SIZES: Final = {"num_layers": 4, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "d_ff": 128, "vocab_size": 256}
_MIXED: Final = {"num_experts": 4, "top_k": 2, "d_ff": 64}
_MODELS: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "tied": {"vocab_size": 8192, "tied_embeddings": True},
    "half rotary": {"rotary_fraction": 0.5, "num_kv_heads": 4},
    "gpt": {
        "num_kv_heads": 4, "positions": "learned", "max_positions": 512, "norm": "layer", "mlp": "gelu_tanh",
        "qkv_bias": True, "out_bias": True, "mlp_bias": True, "fused_qkv": True, "tied_embeddings": True,
    },
    "normed heads": {"qk_norm": True},
    "experts": {"experts": _MIXED},
}  # fmt: skip

_DDP: Final = {"zero": 0, "dp_replicate": 4}
_ZERO1: Final = {"zero": 1, "dp_shard": 4}
_FSDP: Final = {"dp_shard": 4}
_BF16: Final = {"precision": "bf16"}
_ALL_16: Final = {**_BF16, "master_dtype": "bf16", "optimizer_dtype": "bf16", "reduce_dtype": "bf16"}
_SHORT: Final = {"seq_len": 16}
_THREE: Final = {"num_micro_batches": 3}
_KEPT: Final = {"sync_every_micro_batch": False}

PLANS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "one rank": ("llama", {"zero": 0}),
    "one rank, bf16": ("gpt", {"zero": 0, **_BF16}),
    "ddp": ("llama", _DDP),
    "ddp, bf16, checkpointed": ("llama", {**_DDP, **_BF16, "recompute": "full"}),
    "ddp, tied table, short": ("tied", {**_DDP, **_SHORT}),
    "ddp, tied table, accumulated": ("tied", {**_DDP, **_SHORT, **_THREE, **_KEPT}),
    "ddp, tied table, bf16, accumulated": ("tied", {**_DDP, **_SHORT, **_BF16, **_THREE, **_KEPT}),
    "ddp, views of small buckets": ("llama", {**_DDP, "gradient_as_bucket_view": True, "bucket_bytes": 65536}),
    "zero1": ("llama", _ZERO1),
    "zero1, one by one, bf16": ("gpt", {**_ZERO1, **_BF16, "optimizer_impl": "loop"}),
    "fsdp2": ("llama", _FSDP),
    "fsdp2, bf16": ("llama", {**_FSDP, **_BF16}),
    "fsdp2, 16-bit states": ("llama", {**_FSDP, **_ALL_16}),
    "fsdp2, fused adam": ("gpt", {**_FSDP, **_BF16, "optimizer_impl": "fused"}),
    "fsdp2, momentum": ("llama", {**_FSDP, "optimizer": "sgd_momentum", "optimizer_impl": "foreach"}),
    "fsdp2, kept gathered": ("llama", {**_FSDP, "reshard_after_forward": False}),
    "fsdp2, in smaller groups": ("llama", {**_FSDP, **_BF16, "reshard_after_forward": 2}),
    "fsdp2, nothing ahead": ("llama", {**_FSDP, "backward_prefetch": 0}),
    "fsdp2, two ahead, checkpointed": ("llama", {**_FSDP, "forward_prefetch": 2, "recompute": "full"}),
    "fsdp2, checkpointed selectively": ("llama", {**_FSDP, **_BF16, "recompute": "selective"}),
    "fsdp2, each second checkpointed": ("llama", {**_FSDP, "recompute": "every_k", "recompute_every": 2}),
    "fsdp2, accumulated": ("llama", {**_FSDP, **_THREE}),
    "fsdp2, accumulated, bf16, reduced last": ("llama", {**_FSDP, **_BF16, **_THREE, **_KEPT}),
    "fsdp2, tied table, short": ("tied", {**_FSDP, **_SHORT, **_BF16}),
    "fsdp2, tied table, accumulated": ("tied", {**_FSDP, **_SHORT, **_BF16, **_THREE}),
    "fsdp2, tied table, reduced last": ("tied", {**_FSDP, **_SHORT, **_THREE, **_KEPT}),
    "fsdp2, half rotary": ("half rotary", {**_FSDP, **_BF16, "seq_len": 512}),
    "fsdp2, normed heads": ("normed heads", {**_FSDP, **_BF16}),
    "fsdp2, 512 ranks": ("llama", {**_BF16, "dp_shard": 64, "dp_replicate": 8}),
    "hsdp": ("llama", {"dp_shard": 2, "dp_replicate": 2}),
    "hsdp, accumulated, sums in 16 bits": ("llama", {"dp_shard": 2, "dp_replicate": 2, **_ALL_16, **_THREE}),
    "tp": ("llama", {"tp": 2, "zero": 0}),
    "tp, tied table, short": ("tied", {"tp": 2, "zero": 0, **_SHORT}),
    "tp, whole tokens and vocabulary": (
        "llama", {"tp": 2, "dp_shard": 2, "sequence_parallel": False, "vocab_parallel": False}
    ),
    "tp, fsdp2, bf16, checkpointed": ("normed heads", {"tp": 2, "dp_shard": 4, **_BF16, "recompute": "full"}),
    "cp, ring": ("llama", {"cp": 2, "dp_shard": 2}),
    "cp, ring, bf16": ("half rotary", {"cp": 4, **_BF16, "seq_len": 256}),
    "cp, all to all": ("gpt", {"cp": 2, "dp_shard": 2, "cp_exchange": "all_to_all"}),
    "experts": ("experts", _FSDP),
    "ep": ("experts", {**_FSDP, "ep": 2}),
    "ep, bf16, accumulated": ("experts", {**_FSDP, **_BF16, "ep": 4, **_THREE}),
}  # fmt: skip


def task(name: str, device: str) -> Task:
    """What `validate run --mode fake` would be asked."""
    of_model, options = PLANS[name]
    model = Model.parse({"name": of_model, **_SIZES, **_MODELS[of_model]}, of_model, ModelError)
    plan = Plan(**{"seq_len": 64, "precision": "fp32", **options})
    stack = Stack.load(f"torch-2.13-fake-{device}")
    return Task.model_validate({"mode": "fake", "device": device, "model": model, "plan": plan, "stack": stack})
