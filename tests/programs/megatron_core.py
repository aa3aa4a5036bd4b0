"""Three steps of a small GPT of Megatron-Core's local layers, its pipeline schedules and its optimizer: TP PP [sequence] [distributed]."""

import os
import sys
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

warnings.simplefilter("ignore")  # of what is not installed

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

SEQ, VOCAB, MICRO_BATCHES = 32, 128, 4
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
if not ON_GPU:  # which it names wherever it makes a tensor
    torch.cuda.current_device = lambda: DEVICE
    torch.cuda.set_device = torch.cuda.synchronize = torch.cuda.manual_seed = lambda *_: None
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: torch.empty(16, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *_, **__: None
    Tensor.cuda, nn.Module.cuda = lambda self, *_, **__: self, lambda self, *_: self
    torch.cuda.FloatTensor, torch.cuda.is_current_stream_capturing = torch.FloatTensor, lambda: False
    torch.cuda.IntTensor, NAMED = torch.IntTensor, Tensor.type
    Tensor.type = lambda self, *one: NAMED(self, *one) if one else f"torch.cuda.{NAMED(self).split('.')[-1]}"


class Norm(nn.Module):
    """Root mean squares by operators that a CPU has, too. Megatron's own over torch refuse sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(hidden_size, dtype=torch.bfloat16))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


def layers(config: TransformerConfig) -> TransformerBlockSubmodules:
    one = get_gpt_layer_local_spec()
    one.submodules.input_layernorm = one.submodules.pre_mlp_layernorm = Norm
    return TransformerBlockSubmodules([one] * get_num_layers_to_build(config), layer_norm=Norm)


def model_of(tp: int, pp: int, *options: str) -> tuple[Any, Any]:
    config = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, params_dtype=torch.bfloat16, bf16=True,
        pipeline_dtype=torch.bfloat16, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        sequence_parallel="sequence" in options, hidden_dropout=0.0, attention_dropout=0.0,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False,
    )  # fmt: skip
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = GPTModel(
        config, layers(config), VOCAB, SEQ, pre_process=first, post_process=last,
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
    ).to(DEVICE, torch.bfloat16)  # fmt: skip
    sharded = "distributed" in options
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, overlap_grad_reduce=sharded, grad_reduce_in_fp32=True
    )
    wrapped = DistributedDataParallel(config, settings, model)
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped, get_megatron_optimizer(
        OptimizerConfig(bf16=True, params_dtype=torch.bfloat16, lr=1e-3, use_distributed_optimizer=sharded), [wrapped]
    )


def forward(batches: Any, model: Any) -> Any:
    tokens = next(batches)
    places = torch.arange(SEQ, device=DEVICE).expand(len(tokens), SEQ)
    mask = torch.ones(SEQ, SEQ, device=DEVICE).triu(1).bool()[None, None]
    return model(tokens, places, mask, labels=tokens), partial(mean)


def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return losses.float().mean(), {}


def batches() -> Any:
    while True:
        yield torch.randint(0, VOCAB, (2, SEQ), device=DEVICE)


def main(tp: int, pp: int, *options: str) -> None:
    torch.cuda.set_device(DEVICE)
    distributed.init_process_group("nccl" if ON_GPU else "gloo")
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(1)
    model, optimizer = model_of(tp, pp, *options)
    run = get_forward_backward_func()
    for _ in range(3):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        run(
            forward_step_func=forward, data_iterator=batches(), model=model, num_microbatches=MICRO_BATCHES,
            seq_length=SEQ, micro_batch_size=2, forward_only=False,
        )  # fmt: skip
        optimizer.step()


if ON_GPU:
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
else:
    from validate.capture.on_cpu import OnCpu

    with OnCpu():
        main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
