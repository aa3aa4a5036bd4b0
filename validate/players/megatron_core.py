"""A plan's step by Megatron-Core: its local layers (torch's operators, no Transformer Engine), its DDP and its optimizer.

Fusions are off, as their kernels come from apex or are compiled. On a CPU what Megatron-Core asks of CUDA by name is the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from simulator.parallel.model_shard import shard_of
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from validate.models import NORM_EPS, ROPE_BASE
from validate.parallel import DTYPES
from validate.steps import Announce, ignore_phase
from validate.task import Task

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "gelu": functional.gelu,
}


class Norm:
    """Torch's norms, marked for sequence parallelism: Megatron-Core's own wrapper of them refuses it."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = NORM_EPS, **_: object) -> nn.Module:
        made = (nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm)(hidden_size, eps=eps)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return made


def make_step(task: Task, device: torch.device) -> MegatronStep:
    """A GPT of Megatron-Core's layers with the model's shapes, in its DDP. Process groups of all ranks exist."""
    if device.type == "cpu":
        _name_the_cpu(device)
    with _Where(device):
        parallel_state.initialize_model_parallel(task.plan.tp)
        model_parallel_cuda_manual_seed(1)
        return MegatronStep(task, device)


class MegatronStep:
    """What `validate.steps.TrainingStep` is elsewhere: all micro-batches by Megatron-Core's schedule, then its optimizer."""

    built = None

    def __init__(self, task: Task, device: torch.device) -> None:
        model, plan = task.model, task.plan
        self.plan, self.device = plan, device
        self._announce: Announce = ignore_phase
        self._model, self._optimizer = _wrapped(model, plan, device)
        self._run = get_forward_backward_func()
        shape = (plan.micro_batch_size, plan.seq_len)
        self._ids, self._labels = (torch.randint(0, model.vocab_size, shape, device=device) for _ in range(2))
        self._mask = torch.ones(1, 1, plan.seq_len, plan.seq_len, dtype=torch.bool, device=device).triu(1)
        schedules.backward_step = self._announced(schedules.backward_step)

    def run(self, announce: Announce = ignore_phase, num_micro_batches: int | None = None) -> None:
        """All micro-batches, whatever is asked for."""
        del num_micro_batches
        self._announce = announce
        with _Where(self.device):
            self._model.zero_grad_buffer()
            self._optimizer.zero_grad()
            self._run(
                forward_step_func=self._forward,
                data_iterator=self._batches(),
                model=self._model,
                num_microbatches=self.plan.num_micro_batches,
                seq_length=self.plan.seq_len,
                micro_batch_size=self.plan.micro_batch_size,
                forward_only=False,
            )
            announce("optimizer")
            self._optimizer.step()
        announce("end")

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self._ids, self._labels

    def _forward(self, batches: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        self._announce("forward")
        ids, labels = next(batches)
        return model(ids, None, self._mask, labels=labels), _mean

    def _announced(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward_step(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
            self._announce("backward")
            return original(*args, **kwargs)

        return backward_step


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return losses.mean(), {}


class _Where(TorchFunctionMode):  # type: ignore[misc]
    """On a CPU, what is to be made on `cuda` is made there; on a GPU nothing changes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Called by torch in place of the function."""
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = self._device
        return func(*args, **given)


# --- modules and optimizer


def _wrapped(model: Model, plan: Plan, device: torch.device) -> tuple[Any, Any]:
    config, dtype = _config(model, plan), DTYPES[plan.compute_dtype]
    one = get_gpt_layer_local_spec(normalization=config.normalization)
    one.submodules.input_layernorm = one.submodules.pre_mlp_layernorm = Norm
    module = GPTModel(
        config,
        TransformerBlockSubmodules([one] * model.num_layers, layer_norm=Norm),
        shard_of(model, plan).vocab_size * plan.tp,
        plan.seq_len,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope",
        rotary_percent=model.rotary_fraction,
        rotary_base=int(ROPE_BASE),
    ).to(device, dtype)
    sharded = plan.zero == 1
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, overlap_grad_reduce=True, grad_reduce_in_fp32=plan.gradient_dtype == "fp32"
    )
    wrapped = DistributedDataParallel(config, settings, module)
    config.finalize_model_grads_func = finalize_model_grads
    kind = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        clip_grad=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=sharded,
        decoupled_weight_decay=plan.optimizer.kind == "adamw",
    )
    optimizer = get_megatron_optimizer(kind, [wrapped])
    how = {"foreach": (True, None), "fused": (None, True), "loop": (False, None)}[plan.optimizer.impl]
    for group in optimizer.param_groups:
        group["foreach"], group["fused"] = how
    return wrapped, optimizer


def _config(model: Model, plan: Plan) -> TransformerConfig:
    dtype = DTYPES[plan.compute_dtype]
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.d_model,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.d_ff,
        normalization="RMSNorm" if model.norm == "rms" else "LayerNorm",
        layernorm_epsilon=NORM_EPS,
        gated_linear_unit=model.gated,
        activation_func=_ACTIVATIONS[model.mlp],
        add_bias_linear=model.mlp_bias,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=plan.tp,
        sequence_parallel=plan.tp > 1 and plan.sequence_parallel,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        **(full if plan.recompute.mode == "full" else {}),
    )


def _name_the_cpu(device: torch.device) -> None:
    """Answers for what Megatron-Core asks of CUDA itself, which has no other name in it."""
    cuda, named = torch.cuda, Tensor.type
    state = torch.empty(16, dtype=torch.uint8)
    cuda.current_device = lambda: device
    cuda.set_device = cuda.synchronize = cuda.manual_seed = _nothing
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: state
    random._set_cuda_rng_state = _nothing  # noqa: SLF001
    Tensor.cuda = nn.Module.cuda = lambda self, *_, **__: self
    cuda.FloatTensor, cuda.IntTensor, cuda.is_current_stream_capturing = (
        torch.FloatTensor,
        torch.IntTensor,
        partial(bool),
    )
    # it tells types by CUDA's names of them
    Tensor.type = lambda self, *one: named(self, *one) if one else f"torch.cuda.{named(self).split('.')[-1]}"


def _nothing(*_: object, **__: object) -> None:
    """CUDA's own state, which a CPU does not have."""
