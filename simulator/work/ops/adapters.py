"""Fine-tuning inside a linear layer: frozen weights, dequantised where they are stored narrow, and adapters beside them.

Eager adapters are peft's operators (tuners/lora/layer.py, Linear.forward): the input cast to the adapter's dtype, dropout, two
products, scale, sum. Fused ones are one autograd function (unsloth/kernels/fast_lora.py; fms-acceleration has the same):
products accumulate into the layer's result, and nothing but the input is kept.
Legend: T tokens, N columns out, K columns in, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, cast

from simulator.base.kernels import DTYPE_BYTES, Dtype, Gemm, Kernel, Stream, StreamOp
from simulator.work.ops.graph import Graph, Value, conversion, stream
from simulator.work.ops.op_context import OpContext
from simulator.work.parameters import pair_size, stored

# What ops call a linear layer -> the module of the model; others have their own name, or are attention's
_MODULES: Final = {
    **{name: f"mlp.{name}" for name in ("gate", "up", "down", "gate_up")},
    **{name: f"mamba.{name}" for name in ("in_proj", "out_proj", "x_proj", "dt_proj")},
    "logits": "lm_head",
}
_OWN: Final = ("embedding.", "lm_head.", "shared.", "experts.", "latent_", "mtp.", "router", "shared_gate")


def module_of(g: Graph, name: str) -> str:
    """The module whose product an op is."""
    name = name.removeprefix(g.prefix)
    return _MODULES.get(name) or (name if name.startswith(_OWN) else f"attention.{name}")


@dataclass(frozen=True, slots=True)
class Tuning:
    """What fine-tuning makes of a linear layer's weight of N × K elements (of each of `experts`)."""

    s: OpContext
    module: str
    n: int
    k: int
    experts: int = 1

    @property
    def trains(self) -> bool:
        """The weight is trained."""
        return self.s.trains(f"{self.module}.weight")

    @property
    def trains_bias(self) -> bool:
        return self.s.trains(f"{self.module}.bias")

    @property
    def adapts(self) -> bool:
        return self.s.plan.peft.any and self.s.plan.peft.adapts(self.module)

    @property
    def keeps_input(self) -> bool:
        """The frozen weight's product keeps what it read."""
        return self._narrow and not self._wide and self.s.stack.kernels.quantised_keeps_input

    @property
    def keeps_dtype(self) -> bool:
        """The result has the input's dtype again (bitsandbytes, nn/modules.py: Linear4bit.forward ends in `.to(inp_dtype)`)."""
        return self._narrow and not self.trains and self.s.plan.peft.stored in ("nf4", "nf4_double")

    @property
    def keeps_weight(self) -> bool:
        """The dequantised weight stays for the backward.

        Autocast's cast of a frozen weight does: it is no leaf that needs a gradient, so it is not cached (ATen, autocast_mode.cpp:
        cached_cast) but made at each call, and the product saves what it multiplied with.
        """
        by_torch = self.s.stack.kernels.dequantised == "operators" and self.s.plan.peft.stored == "gptq"
        return (by_torch or self._wide) and self._narrow and not self.trains

    @property
    def dequantised_again(self) -> tuple[Stream, ...]:
        """Of those kernels what the backward runs once more."""
        return () if self.keeps_weight else self.dequantised

    def _by_torch(self) -> tuple[Stream, ...]:
        """AutoGPTQ, nn_modules/qlinear/qlinear_cuda_old.py: shifted out of int32, to int8, masked, less its zero, scaled.

        The zeros before, one a group of 128: the same, and one more each.
        """

        def unpacked(n: int) -> tuple[tuple[StreamOp, int, int, int], ...]:
            return ("strided", n // 2, 4 * n, n), ("cast", 4 * n, n, n), ("elementwise", n, n, n)

        n, zeros = self._numel, self._numel // 128
        passes = (
            *unpacked(zeros),
            ("elementwise", zeros, zeros, zeros),
            *unpacked(n),
            ("strided", n, n, n),
            ("strided", n, 2 * n, n),
        )
        return _untimed(*(stream(op, read, write, numel=numel) for op, read, write, numel in passes))

    @property
    def dequantised(self) -> tuple[Stream, ...]:
        """The kernels that make the weight in the compute dtype, before each product that reads it."""
        if self.trains or not self._narrow:
            return ()
        if self._wide:
            return (conversion(self._numel, "fp32", self.s.dtype, self.experts),)
        if self.keeps_weight:
            return self._by_torch()
        held = stored(self._numel, self.k, self.s.plan.peft.stored, self.s.element_bytes)
        kernels: tuple[Stream, ...] = (
            stream("elementwise", held.size + sum(held.beside[:1]), self.temporary_bytes, self.experts),
        )
        if self.s.plan.peft.stored == "nf4_double":  # the scales first, then their offset
            scales = held.beside[0]
            kernels = (stream("elementwise", scales, 4 * scales, 2 * self.experts), *kernels)
        return _untimed(*kernels)

    @property
    def temporary_bytes(self) -> int:
        """Of the dequantised weight, while a product reads it; what the backward keeps is a tensor of its own."""
        return (
            0 if self.trains or not self._narrow or self._wide else self._numel // self.experts * self.s.element_bytes
        )

    @property
    def _numel(self) -> int:
        return self.n * self.k * self.experts

    @property
    def _wide(self) -> bool:
        return self.s.plan.peft.stored == "fp32"

    @property
    def _narrow(self) -> bool:
        as_computed = self._wide and self.s.element_bytes == DTYPE_BYTES["fp32"]
        return self.s.plan.peft.quantised and self.module not in ("lm_head", "router") and not as_computed


def _untimed(*kernels: Stream) -> tuple[Stream, ...]:
    """Libraries have several kernels for one format, by release and by device, and no calibration has one."""
    return tuple(replace(kernel, untimed=True) for kernel in kernels)


def adapted(
    g: Graph, s: OpContext, name: str, x: Value, y: Value, shape: tuple[int, int, int], experts: int = 1
) -> Value:
    """The layer's result with its adapter's; the result itself where it has none. shape: T, N, K of each of `experts`."""
    peft, module = s.plan.peft, module_of(g, name)
    if not peft.any or not peft.adapts(module):
        return y
    if peft.method == "ia3":
        return _scaled(g, name, y, shape, module)
    low = _pair(g, s, name, x, shape, experts)
    if peft.method == "dora":
        y = _renormed(g, s, name, y, low, shape)
    wide, narrow = (y, low) if DTYPE_BYTES[y.dtype] > DTYPE_BYTES[low.dtype] else (low, y)
    out = g.value(f"{name}.adapted", y.numel, wide.dtype)
    if s.stack.traits.fuses_elementwise and low.dtype == y.dtype:
        return g.pointwise(out.name, [y, low], out, aliases=[y])
    if low.dtype == y.dtype:
        return g.pointwise(out.name, [y, low], out, aliases=[y, low])
    g.op(
        out.name,
        inputs=(y, low),
        outputs=(out,),
        forward=(stream("widen", y.num_bytes + low.num_bytes, out.num_bytes, numel=out.numel),),
        backward=(g.conversion(y.numel, out.dtype, narrow.dtype),),
        grads=(narrow,),
        aliases=(wide,),
    )
    return g.cast(out, y.dtype, f"{name}.narrowed")


def _pair(g: Graph, s: OpContext, name: str, x: Value, shape: tuple[int, int, int], experts: int) -> Value:
    """B A x times the scale, in the adapter's dtype."""
    (t, n, k), peft = shape, s.plan.peft
    r = peft.rank_of(module_of(g, name))
    dtype = peft.dtype or s.dtype
    held = peft.master or (s.plan.precision.master if s.autocast else dtype)
    x = g.cast(x, held, f"{name}.lora_x")
    if peft.dropout:
        x = g.dropped(f"{name}.lora_", x)
    x = g.cast(x, dtype, f"{name}.lora_in")
    first = _product(g, s, f"{name}.lora_a", x, (t, r, k), (held, dtype), experts)
    up = _product(g, s, f"{name}.lora_b", first, (t, n, r), (held, dtype), experts)
    if s.stack.traits.fuses_elementwise:  # scale and sum are one kernel
        return up
    if s.stack.kernels.adapters == "copied" and module_of(g, name) == "attention.qkv":
        copied = g.value(f"{name}.lora_columns", t * _adapted_columns(s), dtype)
        g.op(copied.name, inputs=(up,), grads=(), outputs=(copied,), saved=(copied,))
    return g.pointwise(f"{name}.lora", [up])


def _adapted_columns(s: OpContext) -> int:
    """Columns of Q, K and V that have pairs; none where all have, as nothing is copied then."""
    widths = {"q": s.model.q_columns, "k": s.model.kv_columns, "v": s.model.kv_columns}
    found = [width for name, width in widths.items() if s.plan.peft.adapts(f"attention.{name}")]
    return sum(found) if len(found) < len(widths) else 0


def _product(
    g: Graph, s: OpContext, name: str, x: Value, shape: tuple[int, int, int], dtypes: tuple[str, str], experts: int
) -> Value:
    """One of a pair; where it is stored wider (dtypes: stored, multiplied), it is cast at its first use in a micro-batch."""
    (t, n, k), (held, dtype) = shape, dtypes
    weights: tuple[Value, ...] = ()
    out, numel = g.value(name, t * n, dtype), experts * n * k
    if held != dtype:
        weights = (g.value(f"{name}.weight", numel, dtype),)
        casts, back = g.conversion(numel, held, dtype), g.conversion(numel, dtype, held)
        g.op(weights[0].name, inputs=(), outputs=weights, forward=(casts,), backward=(back,),
             parameter_numel=pair_size(s.plan) * numel)  # fmt: skip
    rows, of = -(-t // experts), cast("Dtype", dtype)
    wrapped = s.plan.adapters_apart and s.plan.gathers and s.plan.num_data_parallel > 1
    one = Gemm(m=rows, n=n, k=k, dtype=of, batch=experts, grouped=experts > 1, launches=experts)
    return g.op(
        name,
        "gemm",
        inputs=(x, *weights),
        outputs=(out,),
        forward=(one,),
        backward=(replace(one, n=k, k=n, layout="nn"), replace(one, m=n, n=k, k=rows, layout="nt")),
        saved=(x, *weights),
        parameter_numel=0 if weights else pair_size(s.plan) * numel,
        selective_save=True,
        is_unit=wrapped,
        waits=wrapped,
    )


def fused_kernels(s: OpContext, shape: tuple[int, int, int], r: int) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Kernels that a fused pair of rank r adds to its layer's product, forward and backward.

    Behind dropout, which Unsloth's own has not, its result is added by a kernel, and the gradient of x is masked by what
    was not dropped (fms-acceleration, fused_ops/unsloth_lora/*/fast_lora.py).
    """
    (t, n, k), dtype = shape, cast("Dtype", s.plan.peft.dtype or s.dtype)
    size, dropped = s.element_bytes, s.plan.peft.dropout > 0
    into = Gemm(m=t, n=r, k=k, dtype=dtype)
    there = stream("elementwise", t * k * size, t * k * (size + 1))
    added = stream("elementwise", 2 * t * n * size, t * n * size)
    out = Gemm(m=t, n=n, k=r, dtype=dtype), added if dropped else stream("elementwise", t * n * size, 0, 0)
    back: tuple[Kernel, ...] = (
        replace(into, k=n, layout="nn"),  # dy Bᵀ
        Gemm(m=t, n=k, k=r, dtype=dtype, layout="nn"),  # into the gradient of x
        replace(into),  # A x once more
        Gemm(m=n, n=r, k=t, dtype=dtype, layout="nt"),
        Gemm(m=r, n=k, k=t, dtype=dtype, layout="nt"),
    )
    if dropped:
        masked = stream("widen", t * k * (size + 1), t * k * size, numel=t * k)
        summed = stream("elementwise", 2 * t * k * size, t * k * size)
        back = (*back, back[0], stream("elementwise", t * k * size, t * k), masked, summed)
    return ((there,) if dropped else ()) + (into, *out), back


def _scaled(g: Graph, name: str, y: Value, shape: tuple[int, int, int], module: str) -> Value:
    """IA³: columns times a vector, of the result; a feedforward layer's input is scaled, at about that cost."""
    out, size = g.value(f"{name}.scaled", y.numel, y.dtype), y.num_bytes
    width = shape[2] if module.endswith("down") else shape[1]
    spread = stream("strided", size, size, numel=y.numel)
    return g.op(
        out.name,
        inputs=(y,),
        outputs=(out,),
        forward=(spread,),
        backward=(spread, stream("elementwise", 2 * size, size), stream("reduce", size, width * DTYPE_BYTES[y.dtype])),
        saved=(y,),
        backward_temporary_bytes=size,
        parameter_numel=width,
    )


def _renormed(g: Graph, s: OpContext, name: str, y: Value, low: Value, shape: tuple[int, int, int]) -> Value:
    """DoRA (peft, tuners/lora/dora.py): the norm of W + s B A by rows, then each column of both results times its factor.

    Both results are kept for the gradient of the magnitudes. B A is made by passing an identity matrix through the pair; the norm is a constant in the backward.
    """
    _, n, k = shape
    tuning = Tuning(s, module_of(g, name), n, k)
    r = s.plan.peft.rank_of(tuning.module)
    weight, out = n * k * s.element_bytes, g.value(f"{name}.renormed", y.numel, y.dtype)
    dtype = cast("Dtype", s.plan.peft.dtype or s.dtype)
    norms = g.value(f"{name}.norms", 2 * n, dtype)  # of rows, and the factors
    # less one, of the layer's own result: for its gradient, where it has one
    factor = g.value(f"{name}.factor", n, dtype)
    g.op(factor.name, inputs=(y,), grads=(), outputs=(factor,), saved=(factor,))
    return g.op(
        out.name,
        inputs=(y, low),
        outputs=(out, norms),
        forward=(
            *tuning.dequantised,
            Gemm(m=k, n=r, k=k, dtype=dtype),
            Gemm(m=k, n=n, k=r, dtype=dtype),
            stream("strided", weight, weight, numel=n * k),
            stream("elementwise", 2 * weight, weight),
            stream("reduce", weight, n * s.element_bytes),
            stream("strided", y.num_bytes, out.num_bytes, 2, numel=y.numel),
        ),
        backward=(
            stream("strided", 2 * y.num_bytes, y.num_bytes, 2, numel=y.numel),
            stream("reduce", y.num_bytes, n * s.element_bytes),
        ),
        saved=(y, low, norms),
        grads=(y,),
        forward_temporary_bytes=2 * weight + tuning.temporary_bytes,
        parameter_numel=n,
    )
