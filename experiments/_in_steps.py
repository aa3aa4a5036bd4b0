"""Kernels of profiled steps joined with our bill of the same steps, op by op.

A profiler's spans say how long each kernel took; `simulator.work.ops` says which work each op is. Products are told apart by
their order (names tell the layout), everything else by its name. Profiles of compiled plans show eager kernels, since the
profiled step did not run the compiled graphs, and count as eager.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from _tables import H200_STEPS  # noqa: E402

from simulator.base.kernels import Attention, Gemm, Kernel, Stream, StreamOp  # noqa: E402
from simulator.play.lower import Lowering, lower  # noqa: E402
from simulator.spec.calibration import Calibration  # noqa: E402
from simulator.spec.calibration.collective_curves import default_curves  # noqa: E402
from simulator.spec.software.stack import Stack  # noqa: E402
from simulator.work.ops import Op, optimizer_kernels, recompute_ops  # noqa: E402
from simulator.work.script import communication, pieces, shard_ranks  # noqa: E402
from simulator.work.trace import Span  # noqa: E402
from validate.compare.run import Run  # noqa: E402
from validate.records import read_records  # noqa: E402
from validate.spanfile import read_spans  # noqa: E402

_LAYOUTS = {"TN": "tn", "NN": "nn", "NT": "nt"}  # cuBLAS, column-major: TN is our forward

# Kernel name -> op, first match. Products are matched apart.
_NAMES: tuple[tuple[str, str], ...] = (
    (r"fprop", "attention forward"),
    (r"bprop|fmha_reduce_head|compute_dot_do_o|convert_dq_to_16bits", "attention backward"),
    (r"layer_norm_grad_input|GammaBetaBackward", "norm backward"),
    (r"vectorized_layer_norm", "norm forward"),
    (r"SoftMax(Forward|Backward)", "log-softmax"),
    (r"nll_loss", "pick"),
    (r"split_with_sizes", "FSDP copy-out"),
    (r"chunk_cat", "FSDP copy-in"),
    (r"gather_kernel|sum_and_scatter|compute_grad_weight|radix|krn_|unique_by_key|DeviceScan|num_of_partial|with_index",
     "embedding"),
    (r"multi_tensor_apply", "optimizer"),
    (r"FillFunctor", "fill"),
    (r"silu_backward", "SwiGLU backward"),
    (r"silu_kernel", "SwiGLU forward"),
    (r"vectorized_elementwise.*MulFunctor", "SwiGLU products"),
    (r"unrolled_elementwise.*direct_copy", "cast to fp32"),
    (r"bfloat16_copy", "cast to bf16"),
    (r"unrolled_elementwise.*_add", "mixed sums"),
    (r"vectorized_elementwise.*_add", "sums"),
    (r"elementwise_kernel<128, 4", "rotary, strided"),
    (r"CatArray", "rotary, cat"),
    (r"Memcpy DtoD", "bucket copies"),
    (r"Memset|Memcpy HtoD", "memset and indices"),
    (r"splitKreduce", "product left over"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bill:
    """What an op should take in one step: seconds, its FLOP or bytes, and the elements of its results."""

    seconds: float = 0.0
    amount: float = 0.0
    numel: float = 0.0

    def __add__(self, other: Bill) -> Bill:
        return Bill(self.seconds + other.seconds, self.amount + other.amount, self.numel + other.numel)


Ops = dict[str, tuple[float, Bill]]  # op -> seconds measured, and its bill


def measured(spans: Iterable[Span], lowering: Lowering) -> dict[str, float]:
    """Seconds of each op on the compute stream."""
    found: defaultdict[str, float] = defaultdict(float)
    order = {layout: _products(lowering, layout) for layout in ("tn", "nn", "nt")}
    for span in spans:
        if span.stream != "compute":
            continue
        product = re.match(r"nvjet_\S*?_(?:[A-Za-z]*_)?(TN|NN|NT)[TN]$", span.label)
        if product:
            name = next(order[_LAYOUTS[product[1]]])
        else:
            name = next((op for pattern, op in _NAMES if re.search(pattern, span.label)), "other")
        found[name] += float(span.nominal_s)
    left = [name for names in order.values() for name in names]
    if left:
        msg = f"{len(left)} products of the bill were not seen, the first: {left[0]}"
        raise ValueError(msg)
    return dict(found)


def _products(lowering: Lowering, layout: str) -> Iterator[str]:
    """Names of the products of one layout in the order in which they run."""

    def of(ops: Iterable[Op], *, forward: bool) -> Iterator[str]:
        for op in ops:
            for kernel in op.forward if forward else op.backward:
                if isinstance(kernel, Gemm) and kernel.layout == layout:
                    yield f"product {op.name} {layout}"

    blocks, layers = lowering.blocks, lowering.model.num_layers
    again = recompute_ops(blocks.layer, lowering.plan, lowering.stack)
    for _ in range(lowering.plan.num_micro_batches):
        for _ in range(layers):
            yield from of(blocks.layer.ops, forward=True)
        yield from of(blocks.head.ops, forward=True)
        yield from of(reversed(blocks.head.ops), forward=False)
        for _ in range(layers):
            yield from of(again, forward=True)
            yield from of(reversed(blocks.layer.ops), forward=False)


def billed(lowering: Lowering) -> dict[str, Bill]:
    """What the simulator says of the same step, without collectives."""
    total: dict[str, Bill] = {}
    for name, kernel, times in _kernels(lowering):
        numel = kernel.numel if isinstance(kernel, Stream) else 0
        one = Bill(lowering.clock.seconds(kernel), kernel.flop or kernel.num_bytes, numel)
        total[name] = total.get(name, Bill()) + Bill(times * one.seconds, times * one.amount, times * one.numel)
    return total


def _kernels(lowering: Lowering) -> Iterator[tuple[str, Kernel, int]]:
    plan, blocks, count = lowering.plan, lowering.blocks, lowering.plan.num_micro_batches
    layers = lowering.model.num_layers
    for block, times in ((blocks.embedding, 1), (blocks.layer, layers), (blocks.head, 1)):
        for op in block.ops:
            for kernels, forward in ((op.forward, True), (op.backward, False)):
                yield from ((_name(op, kernel, forward=forward), kernel, times * count) for kernel in kernels)
    for op in recompute_ops(blocks.layer, plan, lowering.stack):
        yield from ((_name(op, kernel, forward=True), kernel, layers * count) for kernel in op.forward)
    sharded = plan.implementation == "fsdp2"
    for unit in communication(lowering.model, plan):
        for kernel in (*unit.gather_forward_kernels, *unit.gather_backward_kernels):
            if kernel.op != "cast":  # shards are cast on FSDP's own stream
                yield "FSDP copy-out", kernel, count
        syncs = count if plan.syncs_every_micro_batch else 1
        yield from (("cast to fp32", kernel, 1) for kernel in unit.keep_kernels)
        yield from (("mixed sums", kernel, count - 1) for kernel in unit.add_kernels)
        yield from (("FSDP copy-in" if sharded else "bucket copies", k, syncs) for k in unit.gradient_kernels)
    numel = -(-lowering.model.num_parameters // shard_ranks(plan))
    tensors = sum(len(shapes) for _, shapes in pieces(lowering.model, plan))
    yield from (("optimizer", kernel, 1) for kernel in optimizer_kernels(numel, tensors, plan))


def _name(op: Op, kernel: Kernel, *, forward: bool) -> str:
    """The op that a kernel of the bill belongs to, as `_NAMES` calls them."""
    direction = "forward" if forward else "backward"
    if isinstance(kernel, Gemm):
        return f"product {op.name} {kernel.layout}"
    if isinstance(kernel, Attention):
        return f"attention {direction}"
    if not isinstance(kernel, Stream):
        raise TypeError(f"{op.name}: no span is known to be of a {type(kernel).__name__}")
    if op.name == "activation":
        return f"SwiGLU {direction}"
    if kernel.op == "elementwise" and op.name in ("product", "nll"):
        return {"product": "SwiGLU products", "nll": "pick"}[op.name]
    if kernel.op == "widen":
        return "mixed sums" if op.name.startswith("residual") else "cast to fp32"
    return _STREAMS[kernel.op]


_STREAMS: dict[StreamOp, str] = {
    "elementwise": "sums",
    "strided": "rotary, strided",
    "join": "rotary, cat",
    "cast": "cast to bf16",
    "norm_forward": "norm forward",
    "norm_backward": "norm backward",
    "softmax": "log-softmax",
    "reduce": "pick",
    "memset": "fill",
    "embedding_forward": "embedding",
    "embedding_backward": "embedding",
}


def lowered(record: dict[str, Any], calibration: Calibration | None = None) -> Lowering:
    """The record's step under eager torch, priced as shipped, or by a `calibration` without the stack's own factor."""
    run = Run.of(record)
    cluster = run.cluster(None, None)
    if cluster is None:
        raise ValueError(run.what)
    stack = Stack.load("torch-2.11-eager")
    if calibration is not None:
        stack = stack.copy_with(gemm_factor={cluster.device.architecture: 1.0})
    calibration = calibration or Calibration.for_device(cluster.device)
    plan = run.plan.copy_with(stack=stack.name)
    return lower(run.model, plan, cluster, stack, calibration, default_curves())


def joined(only: str = "", calibration: Calibration | None = None) -> Iterator[tuple[str, Ops]]:
    """The ops of every plan with spans whose name matches."""
    for record in read_records(H200_STEPS / "runs.jsonl")[0]:
        file = record["files"].get("spans.json.gz")
        if file is None or not re.search(only, file):
            continue
        lowering = lowered(record, calibration)
        seen = measured(read_spans(H200_STEPS / file).spans, lowering)
        bills = billed(lowering)
        names = sorted({*seen, *bills})
        label = file.removesuffix("-spans.json.gz")
        yield label, {name: (seen.get(name, 0.0), bills.get(name, Bill())) for name in names}
