"""The dispatch mode: CUDA tensors are fake, small CPU tensors are real, and every operator on a GPU is written down.

A program keeps its own data on the CPU as it is (loaders, tokenizers, indices); whatever is large or on the GPU has a
shape and no values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode

from simulator.work.captured.capture import CPU, DISPATCH, VIEW, Kind, Phase
from validate.capture import trees, truths, values
from validate.capture.collectives import Collectives
from validate.capture.fakes import Fakes
from validate.capture.log import PRODUCTS, Log, cost_of
from validate.capture.modules import Modules
from validate.capture.ranks import RefusedError
from validate.capture.routing import ALIGNMENTS, Routing
from validate.capture.rows import MAKES_SPARSE, MATRICES, Rows, made_sparse
from validate.capture.storages import Storages, is_pinned, pinned
from validate.capture.streams import Recorder

LARGEST_REAL = 1 << 16  # elements of a CPU tensor that keeps its values
_DTYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
    torch.bool: "bool", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.complex64: "complex64",
}  # fmt: skip
_ANSWERS: dict[Any, Any] = {
    torch.ops.aten.equal.default: True,
    torch.ops.aten.allclose.default: True,
    torch.ops.aten.is_nonzero.default: False,
}
_GPU, _CPU = torch.device("cuda", 0), torch.device("cpu")
_MOST_ZEROS = 1 << 26  # elements of an operator's arguments on which its kernel for CPUs is tried
_OTHERS = frozenset(torch.device("cuda", index) for index in range(1, 64))
_OWN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class CaptureMode(TorchDispatchMode):  # type: ignore[misc]
    """Runs operators on fake tensors where they belong to the GPU, and tells the log."""

    def __init__(
        self, log: Log, storages: Storages, modules: Modules, collectives: Collectives, imbalance: float = 1.0
    ) -> None:
        super().__init__()
        self.fake = Fakes(allow_non_fake_inputs=True)
        self._log, self._storages, self._modules, self.collectives = log, storages, modules, collectives
        self.routing = Routing(log.answer, imbalance)
        self.paused = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Dynamo runs nothing under this mode, so torch need not switch it off for every operator."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor and not self.paused:  # an attribute: on a GPU no operator
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        if kwargs and kwargs.get("pin_memory"):
            return pinned(self.__torch_dispatch__(func, types, args, {**kwargs, "pin_memory": False}))
        kwargs = kwargs or {}
        if kwargs.get("device") in _OTHERS:  # a rank's own GPU, by whatever number, is the one that there is
            kwargs = {**kwargs, "device": _GPU}
        if self.paused:
            return func(*args, **kwargs)
        if any(one not in _OWN for one in types):
            if Rows not in types:
                self._log.handled(DISPATCH, self._modules.phase())
            return NotImplemented  # wrappers as DTensor come back here with what they hold
        if func is _WRAP:  # its fake operator would be another tensor, which nobody waits for
            return AsyncCollectiveTensor(args[0])
        return self._dispatched(func, types, args, kwargs)

    def _dispatched(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        known = self._without_operator(func, args)
        if known is not NotImplemented:
            return known
        key = None if func in _ANSWERS else _composed(func)
        if key is not None:
            # In inference mode, and below autograd inside wrappers as NestedTensor, nobody else takes it apart
            with self:
                implicit = key == DispatchKey.CompositeImplicitAutograd
                return func.decompose(*args, **kwargs) if implicit else func._op_dk(key, *args, **kwargs)
        read = trees.tensors(args) + trees.tensors(kwargs)
        if func in _ANSWERS and any(isinstance(one, FakeTensor) for one in read):
            return self._truth(func, args)
        if not self._is_fake(args, kwargs, read):
            self._log.handled(VIEW, self._modules.phase())
            return func(*args, **kwargs)
        return self._on_gpu(func, types, args, kwargs, read)

    def _without_operator(self, func: Any, args: Sequence[Any]) -> Any:
        """What needs no operator: values, answers, and what holds the rows of a sparse gradient; else NotImplemented."""
        if func in _SCALARS and isinstance(args[0], FakeTensor):
            return self._value(args[0])
        if func is MAKES_SPARSE and isinstance(args[4], FakeTensor):
            return made_sparse(args)
        return _CONSTANTS.get(func, NotImplemented)

    def to_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without values like a real one."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.layout is not torch.strided:
            raise RefusedError(MATRICES)
        found = self.fake.from_tensor(tensor, static_shapes=True)
        found.constant = None  # a copy to the GPU would be made for real
        return pinned(found) if is_pinned(tensor) else found

    def _value(self, tensor: torch.Tensor) -> Any:
        """A value that the host reads from the GPU, and waits for."""
        if tensor.device.type == "cuda":
            Recorder.write(Kind.SYNCHRONIZE, Recorder.stack[-1].number)
        real = values.known(tensor)
        if real is not None:
            return real.item()
        value: Any = False if tensor.dtype == torch.bool else 0.0 if tensor.dtype.is_floating_point else 0
        self._log.answer(f"a value read from a {_DTYPES.get(tensor.dtype, tensor.dtype)} tensor: {value}")
        return value

    def _truth(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether tensors are equal, or one is not zero, which the host waits for."""
        if func is aten.equal.default and args[0].dtype == torch.bool and not args[0].dim():
            # as torch's C++ reads a truth, istft's of its windows
            return bool(self._value(args[0]) == self._value(args[1]))
        Recorder.write(Kind.SYNCHRONIZE, Recorder.stack[-1].number)
        real = [values.known(one) for one in trees.tensors(args)]
        if func is not torch.ops.aten.allclose.default and all(one is not None for one in real):
            return bool(func(*real))
        self._log.answer(f"{func}: {_ANSWERS[func]}")
        return bool(_ANSWERS[func])

    def _is_fake(self, args: Sequence[Any], kwargs: Mapping[str, Any], read: list[torch.Tensor]) -> bool:
        if any(isinstance(one, FakeTensor) for one in read):
            return True
        devices = {one.type for one in (*args, *kwargs.values()) if isinstance(one, torch.device)}
        if devices:
            like = max((one.numel() for one in read if one.device.type == "meta"), default=0)  # as `to_empty` asks
            return "cuda" in devices or ("cpu" in devices and max(like, _made_elements(args)) > LARGEST_REAL)
        return not read and _made_elements(args) > LARGEST_REAL

    def _on_gpu(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        read: list[torch.Tensor],
    ) -> Any:
        log, given = self._log, (args, kwargs)
        log.phase = self._modules.phase()
        if func is _WAIT:  # gives its argument back, where the fake operator would make another tensor
            self.collectives.operator(func, args, args[0])
            return args[0]
        if func is _NO_ZEROS:  # a fake of it were no fake tensor
            log.answer("zeros without a storage, of forward-mode derivatives: as one zero, and operators on them run")
            return self._run(lambda: torch.zeros((), **kwargs).expand(args[0]), (), {})
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
        if not all(isinstance(one, FakeTensor) for one in read):
            args, kwargs = trees.mapped((args, kwargs), self._faked)
        found = self._shaped(func, types, args, kwargs, given)
        results = trees.tensors(found)
        made = [one for one in results if one.device.type == "cuda"]
        if _is_view(func):
            log.handled(VIEW, log.phase)
        self._recorded(func, args, kwargs, found, read, made)
        left = truths.left(func, args)
        found = values.follow(func, *given, found, read, results)
        self.routing.follow(func, args, read, results)
        truths.follow(func, args, made, log.answer, left=left)
        return found

    def _shaped(self, func: Any, types: Any, args: Any, kwargs: Any, given: tuple[Any, Any]) -> Any:
        """Results without values. given: the arguments as the program gave them."""
        try:
            if func in ALIGNMENTS:
                return self.routing.picked(func, *given, self._run)
            return self.fake.dispatch(func, types, args, kwargs)
        except NotImplementedError as exc:
            if "'CUDA' backend" not in str(exc):
                raise
            return self._as_on_cpu(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as exc:
            args_of = given if func is aten._pack_padded_sequence.default else (args, kwargs)  # whose lengths are real
            found = self.routing.picked(func, *args_of, self._run)
            if found is None:
                raise UnknownShapeError(str(func)) from exc
            Recorder.write(Kind.SYNCHRONIZE, Recorder.stack[-1].number)  # the host waits for how many there are
            return found

    def _as_on_cpu(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Results of an operator whose shapes torch has no function for: those of its kernel for CPUs, run on zeros."""
        read = [one for one in trees.tensors((args, kwargs)) if one.device.type == "cuda"]
        if sum(one.numel() for one in read) > _MOST_ZEROS:
            raise RefusedError(
                f"{func}: torch has no shapes of its results, and its arguments are too large to try it on a CPU"
            )
        with self.fake:
            moved = {id(one): torch.empty_strided(one.size(), one.stride(), dtype=one.dtype) for one in read}
        back = {id(there): one for one, there in zip(read, moved.values(), strict=True)}

        def on_cpu(one: Any) -> Any:
            return moved.get(id(one), one) if isinstance(one, torch.Tensor) else _CPU if one == _GPU else one

        def on_gpu(one: torch.Tensor) -> torch.Tensor:
            like = {"dtype": one.dtype, "device": _GPU}
            made = back.get(id(one))
            return torch.empty_strided(one.size(), one.stride(), **like) if made is None else made

        try:
            found = self.fake.dispatch(func, types, *trees.mapped((args, kwargs), on_cpu))
        except (NotImplementedError, RuntimeError) as exc:
            raise RefusedError(f"{func} runs on a GPU only: torch has no shapes of its results") from exc
        with self.fake:
            return trees.mapped(found, lambda one: on_gpu(one) if isinstance(one, torch.Tensor) else one)

    def _recorded(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any, read: list[Any], made: list[Any]
    ) -> None:
        """Write an operator down, and follow what it made on the GPU. On the CPU an optimizer's are the step's, too."""
        log, operates = self._log, not _is_view(func)
        if made or any(one.device.type == "cuda" for one in read):
            exchanges = func.namespace in ("c10d", "_c10d_functional")
            if operates and not exchanges and log.writes(product=func in _PRODUCTS):
                self._write(func, args, kwargs, found)
            elif func in _COPIED and log.detailed:
                self._write(aten.clone.default, args[:1], {}, found)
            for one in made:
                self._storages.see(one)
            if func in _INSIDE:
                self._storages.end(self._storages.begin(_INSIDE[func](args)))
            self.collectives.operator(func, args, found)
        elif operates and log.detailed and log.phase == Phase.OPTIMIZER:
            self._write(func, args, kwargs, found, stream=CPU)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator on the program's own fake tensors that nobody writes down."""
        with self.fake:
            return func(*args, **kwargs)

    def launched(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A kernel that the program launches by itself, as Triton's: it may write to whatever tensor it gets."""
        for one in trees.tensors(args) + trees.tensors(kwargs):
            if isinstance(one, FakeTensor):
                values.forget(one)
        self._log.phase = self._modules.phase()
        if self._log.detailed:
            self._write(f"triton.{name}.default", args, kwargs, None)

    def _faked(self, value: Any) -> Any:
        return self.to_fake(value) if isinstance(value, torch.Tensor) else value

    def _write(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any, stream: int | None = None
    ) -> None:
        signature = (str(func), described((args, kwargs)), described(found))
        if _on_tensor_cores(func):
            signature = _as_tf32(signature)
        known = signature in self._log.signatures
        number = self._log.signature(signature)
        cost = None if known else cost_of(str(func), tuple(args), dict(kwargs))
        if cost is not None:
            self._log.costs[number] = cost
        stream = Recorder.stack[-1].number if stream is None else stream
        self._log.add(Kind.OPERATOR, number, stream, self._log.name(self._modules.path()), int(self._log.phase))


class UnknownShapeError(RefusedError):
    """An operator whose result's shape depends on values, which nobody has."""

    def __init__(self, operator: str) -> None:
        super().__init__(
            f"{operator} gives a result whose shape depends on values, which a capture does not have; "
            "replace it by an operator of fixed shape (a mask, padding, a stated capacity)"
        )


def described(value: Any) -> Any:
    """A value as the file keeps it: tensors as [dtype, shape, strides], numbers and texts as they are."""
    if isinstance(value, torch.Tensor):
        strides = None if value.is_contiguous() else tuple(value.stride())
        one = ("T", _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch.")), tuple(value.shape), strides)
        return one if value.device.type == "cuda" else (*one, "pinned" if is_pinned(value) else "cpu")
    if isinstance(value, Mapping):
        return tuple((str(name), described(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(described(each) for each in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value) if isinstance(value, torch.dtype | torch.device | torch.memory_format | torch.layout) else None


def _on_tensor_cores(func: Any) -> bool:
    """PyTorch multiplies fp32 as TF32 here: in cuDNN's layers unless it is told not to, in other products where it is told to."""
    if func in _CUDNN:
        return bool(torch.backends.cudnn.allow_tf32)
    return func in _PRODUCTS and bool(torch.backends.cuda.matmul.allow_tf32)


def _as_tf32(signature: Any) -> Any:
    """What `described` says, its fp32 tensors as such."""
    if not isinstance(signature, tuple):
        return signature
    return (
        (*signature[:1], "tf32", *signature[2:]) if signature[:2] == ("T", "fp32") else tuple(map(_as_tf32, signature))
    )


@cache
def _composed(func: Any) -> Any:
    """Where torch makes several operators of one; None where that is up to a device."""
    implicit = DispatchKey.CompositeImplicitAutograd
    has = func.has_kernel_for_dispatch_key
    return implicit if has(implicit) and not has(DispatchKey.CUDA) else _OF_OTHERS.get(func)


def _is_view(func: Any) -> bool:
    """No kernel: the result looks at what its argument holds."""
    return func.is_view or func in _NO_KERNEL or torch.Tag.inplace_view in func.tags


aten, functional = torch.ops.aten, torch.ops._c10d_functional
_DEVICE = torch.ops.prim.device.default
_SCALARS = {aten._local_scalar_dense.default, aten.item.default}
_CONSTANTS = {aten.is_pinned.default: True}  # asked by DDP's reducer of memory that it made so
_CONSTANTS |= {  # whose conditions, labels on the CPU among them, programs hardly meet: torch's own kernels
    getattr(getattr(aten, name), form): False
    for name in ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss")
    if hasattr(aten, name)
    for form in getattr(aten, name).overloads()
}
_NO_ZEROS = aten._efficientzerotensor.default
_WAIT = functional.wait_tensor.default
_WRAP = getattr(getattr(functional, "_wrap_tensor_autograd", None), "default", None)  # of torch 2.13
_CUDNN = {
    aten.convolution.default,
    aten.convolution_backward.default,
    aten._cudnn_rnn.default,
    aten._cudnn_rnn_backward.default,
}
_PRODUCTS = {attrgetter(name)(torch.ops) for name in PRODUCTS}
_OF_OTHERS = {
    aten.cholesky_solve.default: DispatchKey.CompositeExplicitAutograd,
    aten.linalg_pinv.atol_rtol_tensor: DispatchKey.CompositeExplicitAutogradNonFunctional,
    aten._embedding_bag_backward.default: DispatchKey.CPU,  # CUDA's is the same function
    aten._trilinear.default: DispatchKey.CompositeExplicitAutogradNonFunctional,
}  # of which torch makes several on every device
# what a kernel allocates while it runs, and no result holds (ATen, DistanceKernel.cu and LossCTC.cu): by arguments its bytes
_INSIDE: dict[Any, Any] = {
    aten._cdist_backward.default: lambda args: args[0].numel() * args[1].shape[-1] * args[1].element_size(),
    aten._pdist_backward.default: lambda args: 2 * args[0].numel() * args[1].shape[-1] * args[1].element_size(),
    aten._ctc_loss_backward.default: lambda args: args[6].nbytes,
    aten._ctc_loss_backward.Tensor: lambda args: args[6].nbytes,
}
_COPIED = {functional.all_reduce.default, functional.broadcast.default}  # on a copy of what they are given
_NO_KERNEL = {
    aten._unsafe_view.default, aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
    aten.new_empty.default, aten.new_empty_strided.default, aten.set_.source_Storage, aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor, aten.resize_.default, aten.record_stream.default, aten.is_same_size.default, aten.lift_fresh.default,
    aten.detach_.default, aten._has_same_storage_numel.default,
}  # fmt: skip


def _made_elements(args: Sequence[Any]) -> int:
    """Elements of what a factory makes; 0 of other operators."""
    sizes = args[0] if args and isinstance(args[0], list | tuple) else ()
    count = 1
    for one in sizes:
        if not isinstance(one, int):
            return 0
        count *= one
    return count if sizes else 0
