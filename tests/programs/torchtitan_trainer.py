"""Three steps of torchtitan's own trainer with its own options: MODEL FLAVOR [--section.option VALUE ...].

Its parts are the registry's own but for the data: numbers in order, where a data set would be downloaded.
"""

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend
from torch.utils.data import IterableDataset

ON_GPU = torch.cuda.is_available()
if not ON_GPU:  # it asks for an accelerator, and names CUDA where there is none
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.set_device = torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda *_: None
    torch.cpu.get_device_name = lambda *_: "CPU"
    torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1)
    torch.cpu.memory_stats = lambda *_: {}

# behind the answers to what these ask when they are imported
from torchtitan import train
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import ConfigManager
from torchtitan.models import attention
from torchtitan.models.moe import kernels
from torchtitan.protocols import train_spec

DIVIDED, COUNTED = FSDPModule.set_gradient_divide_factor, torch.histc


def by_sums(self: FSDPModule, factor: float) -> None:
    """gloo has no reduction that multiplies first, so that here nor there one is asked for."""
    self.set_force_sum_reduction_for_comms(True)
    DIVIDED(self, factor)


def normed(self: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """On a CPU the norm is made of other operators, as here."""
    wide, eps = x.float(), self.eps or torch.finfo(x.dtype).eps
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).type_as(x) * self.weight


FSDPModule.set_gradient_divide_factor, nn.RMSNorm.forward = by_sums, normed
attention.ScaledDotProductAttentionWrapper.sdpa_backends = [SDPBackend.MATH]
if not ON_GPU:  # a barrier of GPUs; counts of whole numbers; a kernel of Triton's
    train.dist_utils.set_pg_timeouts = lambda **_: None
    torch.histc = lambda values, **how: COUNTED(values.float(), **how).to(values.dtype)
    kernels.fill_indices_wrapper = lambda *args, **_: kernels.fill_indices_cpu(*args)


class Tokens(IterableDataset):
    """Sequences without end."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        while True:
            tokens = torch.arange(self.length + 1) % 128
            yield {"input": tokens[:-1]}, tokens[1:]


def loader(dp_world_size: int, dp_rank: int, tokenizer: object, job_config: Any, **_: object) -> Any:
    sizes = job_config.training
    return ParallelAwareDataloader(Tokens(sizes.seq_len), dp_rank, dp_world_size, batch_size=sizes.local_batch_size)


def main(model: str, flavor: str, *options: str) -> None:
    logging.disable(logging.INFO)
    small = ["--training.steps", "3", "--training.seq_len", "32", "--training.local_batch_size", "2"]
    config = ConfigManager().parse_args(["--model.name", model, "--model.flavor", flavor, *small, *options])
    found = replace(train_spec.get_train_spec(model), build_dataloader_fn=loader, build_tokenizer_fn=None)
    train_spec.get_train_spec = lambda _: found
    train.Trainer(config).train()


main(*sys.argv[1:])
