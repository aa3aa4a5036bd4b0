"""Linear layers: three products (forward, data gradient, weight gradient), casts under autocast, quantisation to fp8 and fp4.

Legend: T tokens, N columns out, K columns in, E experts of the rank.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.base.kernels import DTYPE_BYTES, Dtype, Gemm, Kernel, Layout, StreamOp
from simulator.work.ops.adapters import Tuning, adapted, fused_kernels, module_of
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.op_context import OpContext
from simulator.work.ops.quantise import Quantiser, copy_bytes
from simulator.work.ops.tensor_parallel import LayerCommunication, Split
from simulator.work.parameters import pair_size


def linear(  # noqa: PLR0913  a product has that many facts
    g: Graph,
    s: OpContext,
    name: str,
    x: Value,
    width_out: int,
    *,
    bias: bool,
    split: Split,
    head: bool = False,
    tokens: int = 0,
    keeps_input: bool = True,
) -> Value:
    """The product x Wᵀ + b: x is [T, K] (any view of it), the result [T, width_out] in the compute dtype.

    split: how tensor parallelism cuts the weight; both widths are the rank's own. `head`: the LM head, which stays in
    16 bits when the layers' products run in fp8. tokens: T, if not all of the rank's. keeps_input: False where another op
    makes it again for the weight's gradient.
    """
    t, n = tokens or s.tokens, width_out
    comm = LayerCommunication(s, split, "" if head else name)
    k = x.numel // (s.stream_tokens if comm.gathers_input else t)
    dtype = s.wide_dtype if head else s.gemm_dtype
    tuning = Tuning(s, module_of(g, name), n, k)
    weight = _parameters(g, s, name, n * k) if tuning.trains else ()
    given = x
    x = x if x.dtype == "fp8" else g.cast(x, s.dtype, f"{name}.input")
    x, casts, casts_back = _quantised(g, s, name, x, (t, n, k), comm) if dtype in ("fp8", "fp4") else (x, (), ())
    y = g.value(name, t * n // (s.plan.tp if comm.scatters_output else 1), s.dtype)
    rank, added, added_back = _fused_adapters(s, tuning, (t, n, k))
    dropped = (g.value(f"{name}.lora_dropped", t * k, s.dtype),) if added and s.plan.peft.dropout else ()
    if not tuning.trains:
        keeps_input = bool(added) or tuning.keeps_input
        weight = (g.value(f"{name}.dequantised", n * k, s.dtype),) if tuning.keeps_weight else ()
    whole = _whole_bytes(s, x, t * k), t * k * s.element_bytes, t * n * s.element_bytes
    trained = weight if tuning.trains else ()
    products = _scaled(s, *_forward(s, comm, t, n, k, dtype))
    back = _backward(s, dtype, (t, n, k), tuning, bias=bias, pieces=comm.backward_pieces)
    sums = (*comm.ordered(s.batch, whole[2]), *(_added(s, n * k) if tuning.trains else ()))
    g.op(
        name,
        "gemm",
        inputs=(x, *trained),
        outputs=(y, *(() if tuning.trains else weight), *dropped),
        forward=(*casts, *tuning.dequantised, *products, *added, *comm.sums(whole[2])),
        backward=(*casts_back, *tuning.dequantised_again, *_exact(s, *_scaled(s, *back)), *added_back, *sums),
        saved=((x, *weight) if keeps_input else weight) + dropped,
        parameter_numel=_own_numel(tuning, n, n * k, bias=bias, cast=bool(weight)) + pair_size(s.plan) * rank * (n + k),
        forward_exchanges=comm.forward(whole[0], whole[2], len(casts)),
        backward_exchanges=comm.backward(*whole, len(casts_back)),
        forward_temporary_bytes=tuning.temporary_bytes + comm.forward_temporary_bytes(whole[0], whole[2]),
        backward_temporary_bytes=tuning.temporary_bytes + comm.backward_temporary_bytes(*whole),
        selective_save=True,
        dispatched=s.plan.tp > 1 and split != "none" and s.stack.traits.dtensor,
        hooked=s.plan.traits.zero_engine and s.plan.zero == 3,
    )
    if tuning.keeps_dtype:
        y = g.cast(y, given.dtype, f"{name}.widened")
    return y if added else adapted(g, s, name, given, y, (t, n, k))


def _fused_adapters(
    s: OpContext, tuning: Tuning, shape: tuple[int, int, int]
) -> tuple[int, tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Of adapters that are part of a product's op: rank, and kernels forward and backward."""
    if not tuning.adapts or s.stack.kernels.adapters != "fused":
        return 0, (), ()
    rank = s.plan.peft.rank_of(tuning.module)
    return (rank, *fused_kernels(s, shape, rank))


def _own_numel(tuning: Tuning, num_biases: int, numel: int, *, bias: bool, cast: bool) -> int:
    """Trained elements that belong to the product's op. cast: the weight's belong to the op that casts it."""
    return (num_biases if bias and tuning.trains_bias else 0) + (numel if tuning.trains and not cast else 0)


def _quantised(
    g: Graph, s: OpContext, name: str, x: Value, shape: tuple[int, int, int], comm: LayerCommunication
) -> tuple[Value, tuple[Kernel, ...], tuple[Kernel, ...]]:
    """The input in fp8 or fp4, and the casts of forward and backward. shape: (T, N, K)."""
    (t, n, k), gathered = shape, s.plan.tp if comm.gathers_input else 1
    parts = gathered, comm.gradient_parts
    quantise = Quantiser(g, s, name, (t * k, n * k, t * n), parts=parts, shared=g.quantised_before(x))
    x = quantise.input(x)
    if (x.dtype == "fp8" or comm.casts_gradient) and not s.stack.traits.casts_in_modules:
        casts, casts_back = quantise.after_gathers(input_came=x.dtype == "fp8", gradient_parts=comm.gradient_parts)
        return x, casts, casts_back
    return x, quantise.forward(), quantise.backward()


def _whole_bytes(s: OpContext, x: Value, numel: int) -> int:
    """Bytes of the whole input as it is gathered; scales of small blocks travel with their elements."""
    if x.dtype == "fp8" and s.recipe in ("nvfp4", "blockwise"):
        return copy_bytes(s.recipe, numel)
    return numel * DTYPE_BYTES[x.dtype]


def _scaled(s: OpContext, *kernels: Kernel) -> tuple[Kernel, ...]:
    """Products of fp8 operands that have a scale for each block, where the recipe says so."""
    if s.gemm_dtype != "fp8" or s.recipe not in ("blockwise", "mxfp8"):
        return kernels
    return tuple(replace(k, by_blocks=True) if isinstance(k, Gemm) and k.dtype == "fp8" else k for k in kernels)


def _exact(s: OpContext, *kernels: Kernel) -> tuple[Kernel, ...]:
    """fp8 products of the backward, which accumulate with split accumulators: a gradient needs the bits.

    So by default in Transformer Engine (pytorch/module/base.py, _2X_ACC_DGRAD, _2X_ACC_WGRAD; common/recipe, fp8_gemm_dgrad, _wgrad) and,
    where one scale stands for a tensor, in torchao (float8/config.py, gemm_config_grad_input, _grad_weight).
    """
    if s.gemm_dtype != "fp8" or s.recipe == "rowwise":
        return kernels
    return tuple(replace(k, split_accumulator=True) if isinstance(k, Gemm) and k.dtype == "fp8" else k for k in kernels)


def _forward(s: OpContext, comm: LayerCommunication, t: int, n: int, k: int, dtype: Dtype) -> tuple[Kernel, ...]:
    """The forward's product; apart of the rank's own tokens, and of those that come before and behind them."""
    if not comm.own_first:
        return (_product(t, n, k, dtype, comm.pieces),)
    own = t // s.plan.tp
    rest = Gemm(m=t - own, n=n, k=k, dtype=dtype, launches=2 if s.plan.tp > 2 else 1)
    return Gemm(m=own, n=n, k=k, dtype=dtype), rest


def _product(t: int, n: int, k: int, dtype: Dtype, pieces: int, layout: Layout = "tn") -> Gemm:
    """A product of T rows; in pieces, one of T / pieces rows each, whose waves run into one another."""
    return Gemm(m=-(-t // pieces), n=n, k=k, dtype=dtype, layout=layout, batch=pieces, launches=pieces)


def _backward(
    s: OpContext, dtype: Dtype, shape: tuple[int, int, int], tuning: Tuning, *, bias: bool, pieces: int
) -> tuple[Kernel, ...]:
    """Data gradient, weight gradient, and the bias gradient: column sums of dy (in the epilogue where fused)."""
    t, n, k = shape
    kernels: list[Kernel] = [_product(t, k, n, dtype, pieces, "nn")]
    if tuning.trains:
        kernels.append(Gemm(m=n, n=k, k=t, dtype=dtype, layout="nt", accumulate_fp32=_accumulates(s)))
    if bias and tuning.trains_bias and not s.stack.traits.bias_gradient_in_product:
        kernels.append(stream("reduce", t * n * s.element_bytes, n * s.element_bytes))
    return tuple(kernels)


def _accumulates(s: OpContext) -> bool:
    """Weight gradients are added to those of earlier micro-batches as they leave the product."""
    return s.stack.traits.gradient_buffer and s.stack.kernels.weight_gradients != "added"


def _added(s: OpContext, numel: int, launches: int = 1) -> tuple[Kernel, ...]:
    """What adds a weight's gradient to Megatron's buffer (core/distributed, a hook of each parameter), if its product does not."""
    if s.stack.kernels.weight_gradients != "added" or not s.plan.traits.fuses_gradient_sums:
        return ()
    made, gradient_bytes = s.element_bytes, DTYPE_BYTES[s.plan.gradient_dtype]
    op: StreamOp = "widen" if gradient_bytes > made else "elementwise"
    return (stream(op, numel * (made + gradient_bytes), numel * gradient_bytes, launches, numel=numel),)


def grouped_linear(
    g: Graph,
    s: OpContext,
    name: str,
    x: Value,
    widths: tuple[int, int],
    *,
    bias: bool,
    rows: int = 0,
    gradient_came: bool = False,
) -> Value:
    """The products of the rank's experts: x is all their rows [T, K], by expert; the result is [T, N].

    widths: (N, K) of one expert. Each is a product of T / E rows, together one kernel or one each (Transformer Engine
    on several streams). An expert's row counts differ; a mean expert's time stands for each. rows: T, where x came
    narrow with its scales. gradient_came: that of the result comes narrow, so that nothing casts it.
    """
    num_experts, (n, k) = s.experts.num_local, widths
    t = rows or x.numel // k
    tuning = Tuning(s, module_of(g, name), n, k, num_experts)
    weight = _parameters(g, s, name, num_experts * n * k) if tuning.trains else ()
    given = x
    launches = 1 if s.stack.kernels.grouped_gemm == "one" or s.fuses_experts else num_experts
    numels = t * k, num_experts * n * k, t * n
    quantise = Quantiser(g, s, name, numels, launches) if s.plan.narrow else None
    if quantise is not None and x.dtype != "fp8":
        x = quantise.input(x)
    y = g.value(name, t * n, s.dtype)
    casts, casts_back = (quantise.forward(), () if gradient_came else quantise.backward()) if quantise else ((), ())
    rows = -(-t // num_experts)
    one = Gemm(m=rows, n=n, k=k, dtype=s.gemm_dtype, layout="tn", batch=num_experts, grouped=True, launches=launches)
    dequantised = (g.value(f"{name}.dequantised", num_experts * n * k, s.dtype),) if tuning.keeps_weight else ()
    backward: list[Kernel] = [*tuning.dequantised_again, replace(one, n=k, k=n, layout="nn")]
    if tuning.trains:
        backward.append(replace(one, m=n, n=k, k=rows, layout="nt", accumulate_fp32=_accumulates(s)))
    if bias and tuning.trains_bias:
        backward.append(stream("reduce", y.num_bytes, num_experts * n * s.element_bytes))
    backward += _added(s, num_experts * n * k, num_experts) if tuning.trains else ()
    g.op(
        name,
        "gemm",
        inputs=(x, *weight),
        outputs=(y, *dequantised),
        forward=(*casts, *tuning.dequantised, *_scaled(s, one)),
        backward=(*casts_back, *_exact(s, *_scaled(s, *backward))),
        saved=(x, *weight) if tuning.trains else dequantised,
        forward_temporary_bytes=tuning.temporary_bytes,
        backward_temporary_bytes=tuning.temporary_bytes,
        parameter_numel=_own_numel(tuning, num_experts * n, num_experts * n * k, bias=bias, cast=bool(weight)),
        selective_save=True,
    )
    if tuning.keeps_dtype:
        y = g.cast(y, given.dtype, f"{name}.widened")
    return adapted(g, s, name, given, y, (t, n, k), num_experts)


def _parameters(g: Graph, s: OpContext, name: str, numel: int) -> tuple[Value, ...]:
    """Under autocast, the weight's cast: made at its first use in a micro-batch, kept for the data gradient."""
    if not s.autocast or s.parameter_dtype == s.dtype:
        return ()
    weight = g.value(f"{name}.weight", numel, s.dtype)
    g.op(
        f"{name}.weight",
        inputs=(),
        outputs=(weight,),
        forward=(g.conversion(numel, s.parameter_dtype, s.dtype),),
        backward=(g.conversion(numel, s.dtype, s.parameter_dtype),),
        parameter_numel=numel,
    )
    return (weight,)
