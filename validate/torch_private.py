"""What the validator uses of torch that torch does not promise: here alone, each with the versions that it was seen in.

A torch without one of them is refused with its name and these versions, before anything is measured; so a new release
needs its changes here and nowhere else. (Captures have their own: validate/capture.)
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Final

import torch

from validate.torch_releases import STAGES_VOTE, release

# What is used -> the oldest and the newest release that played it here: 2.11 on an H200, 2.8 to 2.15 on CPUs.
SEEN: Final[dict[str, tuple[str, str]]] = {
    "fake tensors": ("2.11", "2.15"),
    "the fake process group": ("2.8", "2.15"),
    "DTensor's propagation of shapes": ("2.13", "2.15"),
    "the memory tracker": ("2.8", "2.15"),
    "checkpoint wrappers": ("2.8", "2.15"),
    "FSDP2's collectives": ("2.11", "2.15"),
    "the allocator's history": ("2.11", "2.11"),
    "the profiler's raw events": ("2.8", "2.15"),
    "fused attention's operators": ("2.11", "2.13"),
    "the switch of autocast": ("2.13", "2.13"),
    "ring attention": ("2.13", "2.15"),
    "scaled products": ("2.13", "2.13"),
    "pipelining": ("2.11", "2.15"),
    "the dispatcher's table": ("2.13", "2.13"),
    "the dispatcher's collectives": ("2.8", "2.14"),
}


@contextlib.contextmanager
def _of(name: str) -> Iterator[None]:
    """Raises ModuleNotFoundError with the versions where torch has it not."""
    try:
        yield
    except (ImportError, AttributeError) as exc:
        raise ModuleNotFoundError(missing(name, torch.__version__, str(exc))) from None


def missing(name: str, installed: str, why: str) -> str:
    """What to say of a torch that has not got something."""
    oldest, newest = SEEN[name]
    seen = f"torch {oldest}" if oldest == newest else f"torch {oldest} to {newest}"
    own = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    newer = own > tuple(int(part) for part in newest.split("."))
    remedy = f"install torch {newest}" if newer else f"install torch {oldest} or newer"
    return f"torch {installed} has {name} otherwise than {seen}, where it was seen ({why}); {remedy}"


with _of("fake tensors"):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
with _of("the fake process group"):
    from torch.testing._internal.distributed.fake_pg import FakeStore
with _of("DTensor's propagation of shapes"):
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    PROPAGATE: Final = "_propagate_tensor_meta_non_cached"
    getattr(ShardingPropagator, PROPAGATE)
    from torch.utils._python_dispatch import _disable_current_modes as without_modes
with _of("the memory tracker"):
    from torch._C import _current_autograd_node
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
with _of("checkpoint wrappers"):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

__all__ = [
    "PROPAGATE",
    "CheckpointImpl",
    "FSDPMemTracker",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "MemTracker",
    "ShardingPropagator",
    "checkpoint_wrapper",
    "running_node",
    "unset_fake_temporarily",
    "without_modes",
]


def default_all_gather() -> type[Any]:
    """FSDP2's own all-gather, to be replaced for a while."""
    with _of("FSDP2's collectives"):
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
    return DefaultAllGather  # type: ignore[no-any-return]


@contextlib.contextmanager
def collectives_called_by(caller: Callable[..., Any]) -> Iterator[None]:
    """caller(collective, *its arguments) stands for every collective on CPU tensors, whoever asks for it, in C++ too.

    At the dispatcher's key that stands before the device's own and has nothing to do here.
    """
    with _of("the dispatcher's collectives"):
        found = [getattr(torch.ops.c10d, name).default for name in _COLLECTIVES]
        cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # noqa: SLF001
        library = torch.library.Library("c10d", "IMPL")
        for name, one in zip(_COLLECTIVES, found, strict=True):
            library.impl(name, partial(caller, partial(one.redispatch, cpu)), "BackendSelect")
    try:
        yield
    finally:
        library._destroy()  # noqa: SLF001


_COLLECTIVES: Final = (
    "_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
    "allreduce_", "allreduce_coalesced_", "alltoall_", "alltoall_base_", "broadcast_", "gather_", "reduce_",
    "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "scatter_",
)  # fmt: skip


def group_of(mesh: Any) -> Any:  # noqa: ANN401
    """The process group of a mesh of several axes: of all its ranks."""
    return mesh._flatten().get_group()  # noqa: SLF001  no public name


def begin_allocator_history(max_entries: int) -> None:
    """CUDA's caching allocator remembers what it does from now on."""
    with _of("the allocator's history"):
        record = torch.cuda.memory._record_memory_history  # noqa: SLF001  the documented entry
    record(max_entries=max_entries, stacks="python", context=None)


def end_allocator_history() -> dict[str, Any]:
    """What it has done; it forgets."""
    with _of("the allocator's history"):
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()  # noqa: SLF001
    torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001
    return snapshot


def raw_events(profiler: Any) -> Any:  # noqa: ANN401
    """Kineto's own list: the public one is made of it in seconds."""
    with _of("the profiler's raw events"):
        return profiler.profiler.kineto_results.events()


def flash_attention() -> Any:  # noqa: ANN401
    """CUDA's flash attention, called directly."""
    with _of("fused attention's operators"):
        return torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001


def scaled_product() -> Any:  # noqa: ANN401
    """The product of fp8 operands that have scales."""
    with _of("scaled products"):
        return torch._scaled_mm  # noqa: SLF001


def efficient_attention() -> Any:  # noqa: ANN401
    """CUDA's memory-efficient attention, called directly."""
    with _of("fused attention's operators"):
        return torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001


def pipelining() -> Any:  # noqa: ANN401
    """Torch's stages and schedules, and `_lone_stage`; the names of a stage's passes, which are wrapped, are not promised."""
    with _of("pipelining"):
        from torch.distributed import pipelining as found
        from torch.distributed.pipelining import schedules

        for name in ("forward_one_chunk", "backward_one_chunk"):
            getattr(found.PipelineStage, name)
    return found.PipelineStage, schedules, _lone_stage


def _lone_stage() -> type[Any]:
    """A stage that agrees with itself that shapes are known: torch's stages vote in turn, by messages."""
    with _of("pipelining"):
        from torch.distributed.pipelining import PipelineStage

        stage: type[Any] = PipelineStage
        if release(torch.__version__) < STAGES_VOTE:
            return stage
        for name in ("_warmup_forward_vote", "_warmup_backward_result"):
            getattr(PipelineStage, name)

    class LoneStage(PipelineStage):  # type: ignore[misc]
        def _warmup_forward_vote(self, *_: object, **__: object) -> Any:  # noqa: ANN401  what stands for a tensor of one
            return SimpleNamespace(item=lambda: 1)

        def _warmup_backward_result(self, received_result: object = None) -> Any:  # noqa: ANN401
            return received_result

    return LoneStage


@contextlib.contextmanager
def held_messages() -> Iterator[None]:
    """What a process group that only pretends has taken of a pipeline is held until it is waited for, as gloo and NCCL do."""
    with _of("pipelining"):
        from torch.distributed.pipelining import schedules

        original = schedules._batch_p2p  # noqa: SLF001

    def batch(ops: Any, *args: object, **kwargs: object) -> Any:  # noqa: ANN401  works
        return [_Holding(original(ops, *args, **kwargs), [one.tensor for one in ops])]

    schedules._batch_p2p = batch  # noqa: SLF001
    try:
        yield
    finally:
        schedules._batch_p2p = original  # noqa: SLF001


class _Holding:
    """Works of messages, and the tensors that are on their way."""

    def __init__(self, works: list[Any], tensors: list[Any]) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._tensors = []


def ring_attention() -> tuple[Any, Any]:
    """Torch's loop over the ranks of a ring around any attention kernel, forward and backward."""
    with _of("ring attention"):
        try:
            from torch.distributed.tensor.experimental._context_parallel import _attention as found
        except ImportError:  # until torch 2.9
            from torch.distributed.tensor.experimental import _attention as found
        return found._templated_ring_attention, found._templated_ring_attention_backward  # noqa: SLF001


def running_node() -> int:
    """The number of the node of autograd's graph whose backward runs; 0 where none does."""
    node = _current_autograd_node()
    return 0 if node is None else int(node._sequence_nr())  # noqa: SLF001


def device_of(fake: FakeTensor) -> torch.device:
    """What a fake tensor answers when asked for its device (FakeTensor.__torch_dispatch__, prim.device)."""
    return torch.device("meta") if fake.fake_mode.in_kernel_invocation else fake.fake_device


def attention_kernels(q: Any) -> tuple[Any, dict[str, Any], Any]:  # noqa: ANN401
    """The kernel that attends to a tensor like `q`, its options, and what makes (kernel, gradient's name, options) of its way back.

    That takes q, and what the forward returned behind its result and its log-sum-exp. CUDA's flash attention takes 16 bits.
    """
    aten = torch.ops.aten
    with _of("fused attention's operators"):
        if q.device.type == "cpu":
            back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001
            options = {"dropout_p": 0.0}
            return (
                aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
                options,
                lambda _q, _rest: (back, "grad_out", options),
            )
        if q.dtype == torch.float32:
            return _efficient, _EFFICIENT, _efficient_back
        return aten._scaled_dot_product_flash_attention.default, {"dropout_p": 0.0}, _flash_back  # noqa: SLF001


_EFFICIENT: Final[dict[str, Any]] = {"attn_bias": None, "compute_log_sumexp": True, "dropout_p": 0.0}


# Rows that the memory-efficient kernel makes its log-sum-exps a multiple of (kAlignLSE, kernel_forward.h)
_ALIGNED: Final = 32


def _efficient(*given: Any, **options: Any) -> tuple[Any, ...]:  # noqa: ANN401
    """Its log-sum-exps without what they are filled up with, so that those of several parts can be joined."""
    out, lse, *rest = torch.ops.aten._scaled_dot_product_efficient_attention.default(*given, **options)  # noqa: SLF001
    return out, lse[:, :, : out.shape[2]], *rest


def _efficient_back(_q: Any, rest: Any) -> tuple[Any, str, dict[str, Any]]:  # noqa: ANN401
    seed, offset = rest
    given = {"attn_bias": None, "philox_seed": seed, "philox_offset": offset, "dropout_p": 0.0}
    return _efficient_gradients, "grad_out_", {**given, "grad_input_mask": (True, True, True, False)}


def _efficient_gradients(**given: Any) -> Any:  # noqa: ANN401
    """Filled up again, by infinities as the kernel does: what has no row has no weight."""
    lse = given.pop("logsumexp")
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % _ALIGNED), value=float("inf"))
    return torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(**given, logsumexp=lse)  # noqa: SLF001


def _flash_back(_q: Any, rest: Any) -> tuple[Any, str, dict[str, Any]]:  # noqa: ANN401
    back = torch.ops.aten._scaled_dot_product_flash_attention_backward.default  # noqa: SLF001
    cum_q, cum_k, max_q, max_k, seed, offset = rest[:6]
    lengths = {"cum_seq_q": cum_q, "cum_seq_k": cum_k, "max_q": max_q, "max_k": max_k}
    return back, "grad_out", {**lengths, "dropout_p": 0.0, "philox_seed": seed, "philox_offset": offset}


def kept_by_selective_checkpoints() -> set[Any]:
    """Operators whose outputs selective checkpointing keeps: products, attention, reduce-scatters."""
    aten = torch.ops.aten
    with _of("fused attention's operators"):
        return {
            torch.ops._c10d_functional.reduce_scatter_tensor.default,  # noqa: SLF001
            aten.mm.default,
            aten.addmm.default,
            aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001
            aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
            aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
            aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
        }


def autocast_stays_on() -> None:
    """Where torch was built without CUDA, autocast on fake CUDA tensors switches itself off otherwise."""
    with _of("the switch of autocast"):
        _ = torch.cuda.amp.common.amp_definitely_not_available
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False


@cache
def is_kernel(name: str) -> bool:
    """An operator that a device runs, not one that is made of others."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None) if name.startswith("aten::") else None
    names = [name if one == "default" else f"{name}.{one}" for one in (packet.overloads() if packet else ())]
    with _of("the dispatcher's table"):
        there, made_of = torch._C._dispatch_has_kernel, torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001
    known = [one for one in names if there(one)]
    return bool(names) and not any(made_of(one, "CompositeImplicitAutograd") for one in known)
