"""torch.compile in a capture: AOTAutograd says what a region saves for its backward, Inductor's scheduler what it fuses.

Neither needs a GPU or Triton: the region is traced on the program's own fake tensors, partitioned, lowered and scheduled as
Inductor would, up to the point where code would be written. Each scheduled node is then one operator of the capture: a
product or another library call as ATen names it, or a fused kernel with the bytes that it reads and writes
(`torch._inductor.scheduler`, torch 2.13). Dynamo is left out: a region is one graph without breaks, for the shapes that it
is called with. A region that cannot be traced so runs as it is written, and the report says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn.attention import flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from simulator.work.captured.capture import Kind
from validate.capture import checkpoints, trees
from validate.capture.inductor import Step, partitioned, scheduled
from validate.capture.log import PRODUCTS, Log
from validate.capture.mode import CaptureMode
from validate.capture.modules import Modules, reached, written_alike
from validate.capture.storages import Storages
from validate.capture.streams import Recorder

_COMPILED = "_shardwise_compiled"  # marks a module whose forward is a region
# what Inductor asks of a device beside its name and size; the same of all data-centre GPUs since Volta (CUDA programming guide)
_PROPERTIES = {
    "type": "cuda",
    "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65_536,
    "gcnArchName": "",
}


class Compilers:
    """Stands for torch.compile and nn.Module.compile."""

    def __init__(self, mode: CaptureMode, log: Log, storages: Storages, modules: Modules) -> None:
        self.mode, self.log, self.storages, self.modules = mode, log, storages, modules
        self.silent = False  # a region is traced: what runs is not the program's
        self._known: dict[Any, dict[Any, Callable[..., Any] | None]] = {}  # of modules that are written alike

    def install(self) -> None:
        """In this process."""

        def compiled(model: Any = None, **kwargs: Any) -> Any:
            if model is None:
                return lambda one: compiled(one, **kwargs)
            if model is flex_attention.flex_attention:  # one kernel, however it is called
                return model
            if isinstance(model, nn.Module):
                self._module(model)
                return model
            return self._region(model, None)

        properties = torch.cuda.get_device_properties(0)
        properties.__dict__.update(_PROPERTIES)
        torch.cuda._get_device_properties = lambda *_: properties  # which Inductor's view of devices has kept
        torch.compile = compiled
        checkpoints.install(lambda: self.silent)
        nn.Module.compile = lambda module, *_, **__: self._module(module)

    def _module(self, module: nn.Module) -> None:
        """Its forward is a region, with the checkpoints inside; hooks around it (FSDP's) run as they are."""
        inner = module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else module  # by its names
        module.forward = self._region(module.forward, inner, module)

    def _region(
        self, function: Callable[..., Any], module: nn.Module | None, whole: nn.Module | None = None
    ) -> Callable[..., Any]:
        """whole: the module with the wrapper around it, if any."""
        alike: dict[bool, dict[Any, Callable[..., Any] | None]] = {}
        method = module

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            module = method
            if module is None and not self.mode.paused:
                modules, breaks = reached(function, (*args, *kwargs.values()))
                if breaks:
                    self._each(modules)
                    return function(*args, **kwargs)
                module = nn.ModuleList(modules)
            named = {**dict(module.named_parameters()), **dict(module.named_buffers())} if module is not None else {}
            args, kwargs = tree_map_only(torch.Tensor, _waited, (args, kwargs))
            leaves, _ = tree_flatten((list(named.values()), args, kwargs))
            if self.mode.paused or not any(isinstance(one, torch.Tensor) and one.is_cuda for one in leaves):
                return function(*args, **kwargs)
            masks = list[Any]()  # FlexAttention's, which no graph takes
            args, kwargs = tree_map(partial(trees.put_aside, masks), (args, kwargs), is_leaf=trees.is_mask)
            leaves, _ = tree_flatten((list(named.values()), args, kwargs))
            key = (torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), *map(_key, leaves))
            names = list(named)

            def flat(values: list[Any], args: Any, kwargs: Any) -> Any:
                args, kwargs = tree_map_only(trees.Mask, lambda one: masks[int(one)], (args, kwargs))
                if module is None:
                    return function(*args, **kwargs)
                with _reparametrize_module(module, dict(zip(names, values, strict=True)), tie_weights=True):
                    return function(*args, **kwargs)

            inputs = (list(named.values()), args, kwargs)
            training = whole is not None and whole.training
            if training not in alike:
                alike[training] = {} if whole is None else self._known.setdefault(self._written(function, whole), {})
            known = alike[training]
            if key not in known:
                known[key] = self._traced(flat, inputs)
            region = known[key]
            if region is None:
                return flat(*inputs)
            self.mode.paused += 1
            try:
                return region(*inputs)
            finally:
                self.mode.paused -= 1

        return call

    @staticmethod
    def _written(function: Callable[..., Any], module: nn.Module) -> Any:
        return getattr(function, "__func__", function), written_alike(module)

    def _each(self, modules: Sequence[nn.Module]) -> None:
        """A function's graph breaks at backwards, optimizers and hooks: the modules that it calls are regions."""
        for one in modules:
            inner = one.module if isinstance(one, DistributedDataParallel) else one
            if not hasattr(inner, _COMPILED):
                setattr(inner, _COMPILED, True)
                self._module(inner)

    def _traced(self, flat: Callable[..., Any], inputs: Any) -> Callable[..., Any] | None:
        """The region compiled, or None where Inductor cannot take it.

        It is traced on tensors like its inputs, not on them: a graph keeps what it was traced on.
        """
        from torch._functorch.aot_autograd import aot_function
        from torch._inductor.decomposition import select_decomp_table

        made: Callable[..., Any] = aot_function(
            flat,
            fw_compiler=self._compiled,
            bw_compiler=self._compiled,
            partition_fn=partitioned,
            decompositions=select_decomp_table(),
        )
        self.mode.paused += 1
        self.silent = True
        try:
            with saved_tensors_hooks(_same, _same):  # a checkpoint around it counts what is saved
                made(*tree_map_only(torch.Tensor, self._like, inputs))
        except Exception as exc:  # noqa: BLE001  whatever a compiler raises, the program itself can run
            lines = str(exc).strip().splitlines() or [""]
            self.log.answer(f"torch.compile: not compiled, {type(exc).__name__}: {lines[0][:100]}")
            return None
        finally:
            self.mode.paused -= 1
            self.silent = False
        self.log.answer("torch.compile: Inductor's kernels, one graph a region")
        return made

    def _like(self, tensor: Any) -> Any:
        """Another tensor of the same shape; a wrapper (DTensor) of others like those that it holds."""
        if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
            return tensor  # as a DTensor's mesh
        if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, FakeTensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: self._like(getattr(tensor, name)) for name in names}
            made = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
            return made.detach().requires_grad_(tensor.requires_grad)
        with self.mode.fake:
            one = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return one.requires_grad_(tensor.requires_grad)

    def _compiled(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        pinned, torch.Tensor.is_pinned = torch.Tensor.is_pinned, lambda *_: False  # what programs are told of their own
        try:
            steps, inputs_of, outputs_of = scheduled(graph, inputs, self.mode.fake)
        finally:
            torch.Tensor.is_pinned = pinned
        return Runner(self, graph, steps, inputs_of, outputs_of)


class Runner:
    """A compiled graph: its values are made at once, its kernels and buffers written down one after another."""

    _boxed_call = True  # AOTAutograd gives a list that may be emptied, so that what is not needed on goes

    def __init__(
        self, owner: Compilers, graph: Any, steps: Sequence[Step], inputs_of: Sequence[str], outputs_of: Sequence[str]
    ) -> None:
        self._owner, self._graph, self._steps = owner, graph, steps
        self._inputs, self._outputs = inputs_of, outputs_of

    def __call__(self, given: list[Any]) -> Any:
        owner = self._owner
        owner.mode.paused += 1
        try:
            with owner.mode.fake:
                made = self._graph(*given)
        finally:
            owner.mode.paused -= 1
        if owner.silent:
            return made
        values = dict(zip(self._inputs, given, strict=True))
        given.clear()
        results = made if isinstance(made, list | tuple) else (made,)
        named = {name: one for name, one in zip(self._outputs, results, strict=True) if isinstance(one, torch.Tensor)}
        owner.log.phase = owner.modules.phase()
        buffers: dict[str, int] = {}
        begun: dict[str, int] = {}
        for step in self._steps:
            self._launch(step)
            if step.collective is not None:
                begun[step.collective[0]] = owner.mode.collectives.compiled(*step.collective[1:])
            elif step.waits in begun:
                Recorder.write(Kind.WAIT_WORK, Recorder.stack[-1].number, begun[step.waits])
            self._ends(step.takes, values, buffers)
            for name, size in step.makes.items():
                if name in named:
                    owner.storages.see(named[name])
                else:
                    buffers[name] = owner.storages.begin(size)
            self._ends(step.ends, values, buffers)
        for number in buffers.values():
            owner.storages.end(number)
        return made

    def _ends(self, names: Sequence[str], values: dict[str, Any], buffers: dict[str, int]) -> None:
        """Buffers that are not needed on."""
        for name in names:
            if name in buffers:
                self._owner.storages.end(buffers.pop(name))
            else:
                values.pop(name, None)

    def _launch(self, step: Step) -> None:
        log = self._owner.log
        if step.signature is None or not log.writes(product=step.signature[0] in PRODUCTS):
            return
        number = log.signature(step.signature)
        if step.cost is not None:
            log.costs[number] = step.cost
        place = log.name(self._owner.modules.path())
        log.add(Kind.OPERATOR, number, Recorder.stack[-1].number, place, int(log.phase))


def _waited(tensor: Any) -> Any:
    """A region begins with a wait for what is still on its way to it."""
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, AsyncCollectiveTensor):
        tensor._local_tensor = local.trigger_wait()
    return _Arrived.apply(tensor) if isinstance(tensor, AsyncCollectiveTensor) else tensor


class _Arrived(torch.autograd.Function):  # type: ignore[misc]
    """What a functional collective gave, once it is there; torch's own wait is none of autograd's."""

    @staticmethod
    def forward(_ctx: Any, tensor: Any) -> Any:
        return tensor.trigger_wait()

    @staticmethod
    def backward(_ctx: Any, gradient: Any) -> Any:
        return gradient


def _same(tensor: Any) -> Any:
    return tensor


def _key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, int | float | str | bool | type(None)) else id(leaf)
