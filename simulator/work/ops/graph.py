"""Graph: builds a block's ops. It names storages, and bills the sums of gradients where a tensor has several users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.base.kernels import DTYPE_BYTES, Kernel, Stream, StreamOp
from simulator.work.ops.core import Block, Category, Exchange, Op, Tensor


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor inside a graph: `numel` elements of the storage `base`, its own unless it is a view."""

    name: str
    numel: int
    dtype: str
    view_of: str = ""

    @property
    def base(self) -> str:
        return self.view_of or self.name

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def tensor(self) -> Tensor:
        return Tensor(name=self.name, num_bytes=self.num_bytes)


def stream(op: StreamOp, read_bytes: int, write_bytes: int, launches: int = 1, *, numel: int = 0) -> Stream:
    """Shorthand for a `Stream`."""
    return Stream(op=op, read_bytes=read_bytes, write_bytes=write_bytes, launches=launches, numel=numel)


def conversion(numel: int, before: str, after: str, launches: int = 1) -> Stream:
    """A cast of `numel` elements as torch does it: vectorised to a narrower dtype, an element at a time to a wider one."""
    read, write = numel * DTYPE_BYTES[before], numel * DTYPE_BYTES[after]
    return stream("widen" if write > read else "cast", read, write, launches, numel=numel)


def _own(inputs: Sequence[Value], others: Sequence[Value]) -> list[Value]:
    return [value for value in inputs if value not in others]


def _needed(saved: Sequence[Value], x: Value) -> int:
    """Bytes that the gradient of `x` reads beside the output's gradient: the one saved tensor, or x's cofactor."""
    return sum(v.num_bytes for v in saved if len(saved) == 1 or v.name != x.name)


class Graph:
    """Ops in the order in which they are added. `fused` graphs bill no sums: their kernels already take them in.

    prefix: what names of ops and tensors begin with from here on, where the same modules are passed once more.
    """

    def __init__(self, name: str, input_value: Value, *, fused: bool = False) -> None:
        self._name, self._input, self._fused = name, input_value, fused
        self._ops: list[Op] = []
        self._values: dict[str, Value] = {input_value.name: input_value}
        self._uneven: set[str] = set()
        self._quantised: set[str] = set()
        self.prefix = ""

    def _full(self, name: str) -> str:
        return name if name.startswith(self.prefix) else f"{self.prefix}{name}"

    def value(self, name: str, numel: int, dtype: str) -> Value:
        """Declare an output. Names are unique in a block."""
        name = self._full(name)
        if name in self._values:
            raise AssertionError(f"{self._name} has two tensors called {name}")
        self._values[name] = Value(name, numel, dtype)
        return self._values[name]

    def quantised_before(self, x: Value) -> bool:
        """Whether x has been cast to fp8 for another product already: compilers join equal casts, eager code repeats them."""
        before = x.name in self._quantised
        self._quantised.add(x.name)
        return self._fused and before

    def view(self, name: str, base: Value, numel: int) -> Value:
        """Declare a view: `numel` elements of `base`, with a gradient of its own."""
        name = self._full(name)
        self._values[name] = Value(name, numel, base.dtype, view_of=base.base)
        return self._values[name]

    def op(  # noqa: PLR0913  an op has that many facts
        self,
        name: str,
        category: Category = "elementwise",
        *,
        inputs: Sequence[Value],
        outputs: Sequence[Value] = (),
        forward: Sequence[Kernel] = (),
        backward: Sequence[Kernel] = (),
        saved: Sequence[Value] = (),
        grads: Sequence[Value] | None = None,
        aliases: Sequence[Value] = (),
        overwrites: Sequence[Value] = (),
        views: Sequence[Value] = (),
        forward_temporary_bytes: int = 0,
        backward_temporary_bytes: int = 0,
        parameter_numel: int = 0,
        forward_exchanges: Sequence[Exchange] = (),
        backward_exchanges: Sequence[Exchange] = (),
        selective_save: bool = False,
        by_torch: bool = False,
        waits: bool = False,
        dispatched: bool = False,
        is_unit: bool = False,
        hooked: bool = False,
    ) -> Value:
        """Append an op; its first output, or of an op that makes none the first input, which goes on as it is.

        `aliases` are inputs whose gradient has no storage of its own, `grads` those that have one: None: the others.
        """
        grads = _own(inputs, (*aliases, *overwrites)) if grads is None else grads
        op = Op(
            name=self._full(name),
            category=category,
            forward=tuple(forward),
            backward=tuple(backward),
            inputs=tuple(v.base for v in inputs),
            outputs=tuple(v.tensor for v in outputs),
            saved=tuple(dict.fromkeys(v.base for v in saved)),
            grad_inputs=tuple(v.tensor for v in grads),
            grad_aliases=tuple(v.name for v in aliases),
            grad_overwrites=tuple(v.base for v in overwrites),
            views=tuple(v.name for v in views),
            forward_temporary_bytes=forward_temporary_bytes,
            backward_temporary_bytes=backward_temporary_bytes,
            parameter_numel=parameter_numel,
            forward_exchanges=tuple(forward_exchanges),
            backward_exchanges=tuple(backward_exchanges),
            selective_save=selective_save,
            by_torch=by_torch,
            waits=waits,
            dispatched=dispatched,
            is_unit=is_unit,
            hooked=hooked,
        )
        self._ops.append(op)
        return (*outputs, *inputs)[0]

    def sums_strided(self, x: Value) -> None:
        """The gradients of `x` lie differently in memory, so their sum takes the kernel for strided tensors."""
        self._uneven.add(x.name)

    def conversion(self, numel: int, before: str, after: str) -> Stream:
        """The kernel of a cast; a compiler's own is a vectorised one."""
        kernel = conversion(numel, before, after)
        return replace(kernel, op="elementwise") if self._fused else kernel

    def hold(self, name: str, values: Sequence[Value]) -> Value:
        """Python locals: `values` live until here even if no op saves them; the last of them."""
        self.op(name, inputs=values, grads=())
        return values[-1]

    def pointwise(  # noqa: PLR0913  an op has that many facts
        self,
        name: str,
        inputs: Sequence[Value],
        output: Value | None = None,
        *,
        saved: Sequence[Value] = (),
        grads: Sequence[Value] | None = None,
        aliases: Sequence[Value] = (),
        op: StreamOp = "elementwise",
        category: Category = "elementwise",
        backward_temporary_bytes: int = 0,
    ) -> Value:
        """One kernel that reads `inputs` once and writes `output`; backward, one kernel for each of `grads` (see `op`).

        output: None: as large as the first input, under the op's name.
        """
        output = output or self.value(name, inputs[0].numel, inputs[0].dtype)
        grads = _own(inputs, aliases) if grads is None else grads
        return self.op(
            name,
            category,
            inputs=inputs,
            outputs=(output,),
            forward=(stream(op, sum(v.num_bytes for v in inputs), output.num_bytes, numel=output.numel),),
            backward=[stream(op, output.num_bytes + _needed(saved, g), g.num_bytes, numel=g.numel) for g in grads],
            saved=saved,
            grads=grads,
            aliases=aliases,
            backward_temporary_bytes=backward_temporary_bytes,
        )

    def dropped(self, prefix: str, x: Value, category: Category = "elementwise") -> Value:
        """Dropout in a kernel of its own, which writes its mask."""
        out, mask = self.value(f"{prefix}dropped", x.numel, x.dtype), self.value(f"{prefix}mask", x.numel, "int8")
        written = out.num_bytes + mask.num_bytes
        there, back = stream("elementwise", x.num_bytes, written), stream("elementwise", written, x.num_bytes)
        both = (out, mask)
        return self.op(out.name, category, inputs=(x,), outputs=both, forward=(there,), backward=(back,), saved=(mask,))

    def cast(self, x: Value, dtype: str, name: str, category: Category = "elementwise") -> Value:
        """`x` in another dtype; itself if it has it already."""
        if x.dtype == dtype:
            return x
        out = self.value(name, x.numel, dtype)
        there, back = self.conversion(x.numel, x.dtype, dtype), self.conversion(x.numel, dtype, x.dtype)
        return self.op(name, category, inputs=(x,), outputs=(out,), forward=(there,), backward=(back,))

    def block(self, output: Value, num_parameters: int) -> Block:
        """The finished block."""
        ops = self._ops if self._fused else self._with_sums()
        return Block(
            name=self._name,
            ops=tuple(ops),
            input=self._input.name,
            output=output.name,
            num_parameters=num_parameters,
            input_bytes=self._input.num_bytes,
        )

    def _with_sums(self) -> list[Op]:
        """Every differentiable use of a tensor but the last costs one sum, when its gradient arrives in the backward."""
        seen: set[str] = set()
        summed: list[Op] = []
        for op in reversed(self._ops):
            extra: list[Kernel] = []
            for name in (*(t.name for t in op.grad_inputs), *op.grad_aliases):
                if name in seen:
                    x = self._values[name]
                    how: StreamOp = "strided" if name in self._uneven else "elementwise"
                    extra.append(stream(how, 2 * x.num_bytes, x.num_bytes, numel=x.numel))
                seen.add(name)
            summed.append(replace(op, backward=(*op.backward, *extra)) if extra else op)
        return summed[::-1]


# What a compiler fuses: residual sums into the norms beside them, and the sums of gradients into norm backwards


def fuse_residuals(block: Block, size: int) -> Block:
    """The block's norms as inductor runs them. `size`: bytes of one [T, D] tensor.

    Forward: a residual sum and the norm after it are one kernel that reads both addends and writes the sum and the
    normalised rows. Backward: one kernel reads the gradients of all the norm's users, the norm's input and the
    residual's gradient, and writes their sum; another reads them again for the weight's column sums.
    """
    users = _users(block)
    ops = list(block.ops)
    for i, op in enumerate(ops):
        if op.category != "norm" or op.grad_inputs[0].num_bytes != size:
            continue
        ops[i] = replace(op, backward=_backward(op, users, size))
        if i > 0 and ops[i - 1].outputs and ops[i - 1].outputs[0].name == op.inputs[0] and ops[i - 1].grad_aliases:
            ops[i - 1], ops[i] = _joined(ops[i - 1], ops[i])
    return replace(block, ops=tuple(ops))


def _users(block: Block) -> Counter[str]:
    """Tensor -> how many ops make a gradient of it."""
    return Counter(name for op in block.ops for name in (*(t.name for t in op.grad_inputs), *op.grad_aliases))


def _backward(op: Op, users: Counter[str], size: int) -> tuple[Kernel, ...]:
    gradients, others = max(1, users[op.outputs[0].name]), users[op.inputs[0]] - 1
    return (
        stream("norm_backward", (gradients + 1 + others) * size, size),
        stream("norm_backward", (gradients + 1) * size, 0, 2),
    )


def _joined(residual: Op, norm: Op) -> tuple[Op, Op]:
    """The sum's kernel goes into the norm's: it reads the addends and writes both results."""
    total = sum(kernel.num_bytes for kernel in (*residual.forward, *norm.forward))
    written = sum(t.num_bytes for op in (residual, norm) for t in op.outputs)
    read = total - written - residual.outputs[0].num_bytes  # the norm need not read the sum
    return replace(residual, forward=()), replace(norm, forward=(stream("norm_forward", read, written),))
