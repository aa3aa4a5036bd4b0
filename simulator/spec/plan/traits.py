"""Traits of an implementation of data parallelism: what a plan and its legality need to know of it.

The implementations stand in `simulator.work.script`, one file each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from simulator.base.registry import IMPLEMENTATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an implementation does, as facts that others may ask for.

    zero_stages: the ZeRO stages that it has; default_for: those that it runs where a plan names no implementation.
    gathers_from: the stage from which on parameters are gathered in every micro-batch; gathers_fp8: stages in which
    matrices of layers can travel in fp8.
    gradient_dtype: what gradients travel in unless a plan says so.
    """

    name: str
    zero_stages: tuple[int, ...]
    default_for: tuple[int, ...] = ()
    gathers_from: int = 3
    gathers_fp8: tuple[int, ...] = ()
    gradient_dtype: Literal["master", "compute", "fp32"] = "compute"
    # every rank holds the modules whole, in the master dtype; gradients travel in buckets (DDP)
    whole_modules: bool = False
    # hooks around the user's modules issue the collectives (FSDP)
    hooks_modules: bool = False
    # a flat vector is trained or frozen as a whole, so adapters are units of their own (peft's fsdp_auto_wrap_policy)
    wraps_adapters: bool = False
    # each parameter is sharded by its rows (DTensor), not as a part of a flat vector
    shards_rows: bool = False
    # ranks compute with 16-bit parameters, and the optimizer keeps an fp32 copy beside them, made when it is built
    master_copy: bool = False
    # its momenta too, which others make in the first step
    states_when_built: bool = False
    # all gradients are reduced among all ranks, also where the optimizer's state is sharded
    reduces_among_all: bool = False
    # the framework brings the model's code: vocabulary padded for tp, each rank of tp sends its part between stages,
    # plain schedules wait for their messages
    own_model_code: bool = False
    # two stages exchange one message at a time: activations that are due before the gradient made before them
    messages_in_turn: bool = False
    # layers are dealt to stages by what they compute, the head with them (`parallel.pipeline.balance`)
    balances_stages: bool = False
    # products add weight gradients into the gradient buffer themselves (gradient accumulation fusion)
    fuses_gradient_sums: bool = False
    # experts are sharded and reduced in groups of their own
    expert_groups: bool = False
    # its own layer of experts, where they are dealt to ranks, sends rows by products with masks, whatever the model's code
    masks_rows: bool = False
    # pipelines add bf16 gradients up in fp32 beside them
    sums_in_fp32: bool = False
    # layers are Megatron-Core's, which compose Transformer Engine's modules, and no modules of the user's
    core_layers: bool = False
    # parameters and states below HBM: shards of modules (torch's CPUOffloadPolicy)
    offloads_units: bool = False
    # DeepSpeed's engine: buckets of its own, ZeRO++, MiCS, and flat partitions below HBM with a vectorised CPU Adam
    zero_engine: bool = False
    # replicas may take steps alone and agree on their parameters every so many
    takes_local_steps: bool = False

    @property
    def uses_torch_pipelines(self) -> bool:
        """Stages are those of torch.distributed.pipelining: the modules are the user's."""
        return (self.whole_modules or self.hooks_modules) and not self.own_model_code


@cache  # a registered value stays: plans ask thousands of times
def traits_of(name: str) -> Traits:
    """The traits of an implementation. Raises KeyError for an unregistered name."""
    found: Traits = IMPLEMENTATIONS[name].traits
    return found


def implementation_names() -> tuple[str, ...]:
    """Names that `data_parallel` may have."""
    return IMPLEMENTATIONS.names()


@cache
def default_implementation(zero: int) -> str:
    """The usual implementation of a ZeRO stage. Raises KeyError where none is."""
    for name in implementation_names():
        if zero in traits_of(name).default_for:
            return name
    raise KeyError(zero)
