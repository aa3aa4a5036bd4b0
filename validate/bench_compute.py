"""Benches of compute: products, attention, passes over memory, losses, embeddings, optimizers, and what the host costs.

Each bench is a generator of items in the order of what they tell: the ends and the middle of a range first, then what
lies between. An item is a call; the worker stops asking when the phase's time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, TypeVar

from simulator.kernels import DTYPE_BYTES
from validate.stopwatch import Session, torch_dtype

T = TypeVar("T")
Item = Callable[[], object]
Tensor = Any  # torch is loaded by the worker
Shape = dict[str, object]

LAYOUTS = ("tn", "nn", "nt")
FIRST_SHAPES = 8  # in every layout before the others: what a fit needs at least
GPU_WIDTHS = ((768, 3072), (2048, 8192), (4096, 14336), (5120, 13824), (8192, 28672))
GPU_TOKENS = (512, 2048, 4096, 8192, 16384)
CPU_WIDTHS = ((128, 352), (256, 704), (512, 1408), (768, 2048))
CPU_TOKENS = (128, 256, 512, 1024)
CPU_ROTATE_BYTES, CPU_SETS = 2**23, 12  # of a pass's inputs on a CPU: beyond the caches that a core has for itself
COLD_BYTES, COLD_SETS = 2**25, 128  # of a product's right operands on a CPU: beyond the last cache
FP8_CAPABILITY = (8, 9)
GPU_SETS = 64  # of a pass's inputs on a GPU, at most
ROTATE_BYTES = 2e8  # inputs are rotated until they exceed every cache, four sets at most


def spread(items: Sequence[T]) -> list[T]:
    """The ends first, then the middle, then the quarters …: every prefix covers the range."""
    last = len(items) - 1
    order = dict.fromkeys((0, last)) if last >= 0 else {}
    step = last
    while step > 1 and len(order) < len(items):
        step = (step + 1) // 2
        order |= dict.fromkeys(range(0, last, step))
    order |= dict.fromkeys(range(len(items)))
    return [items[i] for i in order]


# -- products ------------------------------------------------------------------------------------------------------


def gemm_items(s: Session) -> Iterator[Item]:
    """Shapes by FLOP, spread; the first few in each of three layouts, then all; other dtypes on squares; then long repeats for the power limit."""
    main = "bf16" if s.gpu else "fp32"
    shapes = spread(gemm_shapes(s))
    for few, layout in product((shapes[:FIRST_SHAPES], shapes[FIRST_SHAPES:]), LAYOUTS):
        for m, n, k in few:
            yield partial(gemm, s, *_by_layout(m, n, k, layout), main, layout)
    others = ("fp16", "tf32", "fp32", *(("fp8",) if _has_fp8(s) else ())) if s.gpu else ("bf16",)
    sides = (64,) if s.setting.tiny else (1024, 4096, 8192) if s.gpu else (128, 256, 512)
    for dtype, side in product(others, spread(sides)):
        yield partial(gemm, s, side, side, side, dtype, "tn")
    if not s.gpu:
        for m, n, k in spread(gemm_shapes(s)):
            for layout in LAYOUTS:
                yield partial(gemm, s, *_by_layout(m, n, k, layout), "bf16", layout)


def sustained_items(s: Session) -> Iterator[Item]:
    """One second a shape at the power limit, in the three layouts; attention too."""
    if not s.gpu:
        return
    long_s, widths, tokens = (0.01, ((64, 128),), 64) if s.setting.tiny else (1.0, GPU_WIDTHS[1:], 8192)
    for (d, f), layout in product(spread(widths), LAYOUTS):
        yield partial(gemm, s, *_by_layout(tokens, f, d, layout), "bf16", layout, long_s=long_s)
    for dtype in ("tf32", *(("fp8",) if _has_fp8(s) else ())):
        yield partial(gemm, s, tokens, tokens, tokens, dtype, "tn", long_s=long_s)
    case = (1, 64, 4, 2, 16) if s.setting.tiny else (1, 8192, 32, 8, 128)
    for direction in ("forward", "backward"):
        yield partial(attention, s, case, causal=True, dtype="bf16", only=direction, long_s=long_s)


def _has_fp8(s: Session) -> bool:
    """Tensor cores multiply fp8 from compute capability 8.9 on (Ada, Hopper)."""
    return bool(s.gpu and tuple(s.torch.cuda.get_device_capability()) >= FP8_CAPABILITY)


def gemm_shapes(s: Session) -> list[tuple[int, int, int]]:
    """(m, n, k) of forward products, by FLOP: those of models, squares, skinny ones, sides off the tile."""
    if s.setting.tiny:
        return [(64, 64, 64), (64, 256, 64), (64, 64, 256), (256, 256, 256)]
    widths, tokens = (GPU_WIDTHS, GPU_TOKENS) if s.gpu else (CPU_WIDTHS, CPU_TOKENS)
    found = {(t, n, k) for t, (d, f) in product(tokens, widths) for n, k in ((d, d), (f, d), (d, f), (d // 4, d))}
    if s.gpu:
        found |= {(8192, v, d) for v, d in ((128256, 4096), (50257, 2048), (32000, 4096))}
        found |= {(4095, 4096, 4096), (4096, 4095, 4096), (4096, 4096, 4095), (4104, 4104, 4104)}
        found |= {(128, 8192, 8192), (16, 8192, 8192), (1024, 1024, 1024), (4096, 4096, 4096)}
    else:
        found |= {(t, v, d) for t, v, d in product((128, 512), (1000, 4096, 8192), (128, 256))}
        found |= {(127, 256, 256), (129, 257, 255), (64, 64, 64), (1024, 1024, 1024), (8, 512, 512), (512, 16, 512)}
    return sorted(found, key=lambda x: (x[0] * x[1] * x[2], x))


def _by_layout(t: int, n: int, k: int, layout: str) -> tuple[int, int, int]:
    """Sides of the product in a layout: forward [t,k][k,n], data gradient [t,n][n,k], weight gradient [n,t][t,k]."""
    return {"tn": (t, n, k), "nn": (t, k, n), "nt": (n, k, t)}[layout]


def gemm(s: Session, m: int, n: int, k: int, dtype: str, layout: str, long_s: float = 0.0) -> None:
    """Time one product. tn: x Wᵀ; nn: x W; nt: xᵀ y."""
    set_bytes = DTYPE_BYTES[dtype] * (m * k + k * n)
    sets = max(1, min(4, int(ROTATE_BYTES / set_bytes)))
    if not s.fits(set_bytes * sets + 4 * m * n):
        return
    s.torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    a = [s.random(*((k, m) if layout == "nt" else (m, k)), dtype=dtype) for _ in range(sets)]
    b = _operands(s, (n, k) if layout == "tn" else (k, n), dtype, sets)
    left = [x.t() if layout == "nt" else x for x in a]
    right = [x.t() if layout == "tn" else x for x in b]
    count = len(right)
    call = _scaled(s, left, right) if dtype == "fp8" else lambda i: left[i % sets] @ right[i % count]
    shape: Shape = {"m": m, "n": n, "k": k, "dtype": dtype, "layout": layout, "flop": 2 * m * n * k}
    if long_s:
        s.sustained("gemm", call, shape, seconds=long_s)
    else:
        s.record("gemm", call, shape, graph=True)


def _operands(s: Session, shape: tuple[int, int], dtype: str, sets: int) -> list[Tensor]:
    """Right operands in turn: on a CPU so many that none of them is in a cache when its turn comes.

    In a step a weight, or the input that a weight gradient needs, was last touched a whole step ago; the other operand
    has just been made.
    """
    if s.gpu:
        return [s.random(*shape, dtype=dtype) for _ in range(sets)]
    first = s.random(*shape, dtype=dtype)
    count = max(sets, min(COLD_SETS, COLD_BYTES // (DTYPE_BYTES[dtype] * shape[0] * shape[1])))
    return [first, *(first.clone() for _ in range(count - 1))]


def _scaled(s: Session, left: list[Tensor], right: list[Tensor]) -> Callable[[int], object]:
    """fp8 product with one scale a tensor, fast accumulation, bf16 out."""
    one, multiply = s.torch.ones((), device=s.setting.device), s.torch._scaled_mm  # noqa: SLF001  no public name
    bf16, count = s.torch.bfloat16, len(left)
    return lambda i: multiply(left[i % count], right[i % count], one, one, out_dtype=bf16, use_fast_accum=True)


# -- attention -----------------------------------------------------------------------------------------------------


def attention_items(s: Session) -> Iterator[Item]:
    """(batch, sequence, heads, key heads, head width), causal first."""
    gpu = [(4, 2048, 32, 8, 128), (1, 8192, 32, 8, 128), (1, 32768, 32, 8, 128), (8, 1024, 12, 12, 64)]
    gpu += [(1, 16384, 32, 8, 128), (2, 4096, 64, 8, 128), (2, 4096, 32, 32, 64), (2, 4096, 32, 32, 96)]
    cpu = [(1, 256, 8, 4, 32), (2, 128, 6, 6, 32), (1, 512, 8, 8, 64), (4, 64, 4, 2, 32), (1, 1024, 4, 4, 32)]
    cpu += [(2, 256, 8, 8, 32), (2, 512, 4, 4, 64), (1, 128, 12, 12, 64)]
    cases = [(1, 64, 4, 2, 16), (1, 128, 4, 4, 32), (2, 64, 4, 4, 32)] if s.setting.tiny else gpu if s.gpu else cpu
    dtypes = ("bf16",) if s.gpu else ("fp32", "bf16")
    for dtype, causal, case in product(dtypes, (True, False), cases):
        if causal or case[1] <= 16384:
            yield partial(attention, s, case, causal=causal, dtype=dtype)


def attention(
    s: Session,
    case: tuple[int, int, int, int, int],
    *,
    causal: bool,
    dtype: str,
    only: str = "",
    long_s: float = 0.0,
) -> None:
    """Time torch's scaled_dot_product_attention, forward and backward."""
    batch, seq, heads, kv_heads, width = case
    torch = s.torch
    if not s.fits(8 * DTYPE_BYTES[dtype] * batch * heads * seq * width):
        return
    q, k, v = (s.random(batch, h, seq, width, dtype=dtype).requires_grad_() for h in (heads, kv_heads, kv_heads))
    attend = torch.nn.functional.scaled_dot_product_attention

    def forward(_: int) -> Tensor:
        return attend(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

    shape: Shape = {"batch": batch, "seq_q": seq, "seq_kv": seq, "num_heads": heads, "num_kv_heads": kv_heads}
    shape |= {"head_dim": width, "causal": causal, "dtype": dtype}
    take = partial(s.sustained, seconds=long_s) if long_s else s.record
    if only != "backward":
        take("attention_forward", forward, shape)
    if only != "forward":
        out = forward(0)
        gradient = torch.randn_like(out)
        take("attention_backward", lambda _: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), shape)


# -- passes over memory --------------------------------------------------------------------------------------------


def stream_items(s: Session) -> Iterator[Item]:
    """Every pass over every size, sizes spread; the passes that a block is made of come first."""
    widths = (64,) if s.setting.tiny else (1024, 4096, 8192) if s.gpu else (128, 256, 704)
    sizes = [2**p for p in range(20, 30)] if s.gpu else [2**p for p in range(14, 26)]
    sizes = [2**12, 2**14, 2**16, 2**18] if s.setting.tiny else sizes
    dtypes = ("bf16", "fp32") if s.gpu else ("fp32", "bf16")
    for dtype, num_bytes in product(dtypes, spread(sizes)):
        for name in PASSES:
            yield partial(one_pass, s, name, num_bytes, widths[1 % len(widths)], dtype)
    for dtype, width, num_bytes in product(dtypes, widths, spread(sizes)[:3]):
        yield partial(one_pass, s, "softmax_forward", num_bytes, width, dtype)


def one_pass(s: Session, name: str, num_bytes: int, width: int, dtype: str) -> None:
    """Time one memory-bound operator on inputs of `num_bytes` in rows of `width`."""
    element = DTYPE_BYTES[dtype]
    rows = max(1, num_bytes // element // width)
    if not s.fits(8 * rows * width * 4 * (_gpu_sets(s, num_bytes) if s.gpu else 1)):
        return
    op, build, read, write, launches = PASSES[name]
    call = _rotated(s, build, rows, width, dtype, num_bytes)
    numel = rows * width
    shape: Shape = {"op": name, "stream_op": op, "launches": launches, "elements": numel, "width": width}
    shape |= {"read_bytes": int(read(element) * numel), "write_bytes": int(write(element) * numel), "dtype": dtype}
    s.record("stream", call, shape, graph=not name.endswith("_backward"))


def _rotated(s: Session, build: Build, rows: int, width: int, dtype: str, num_bytes: int) -> Callable[[int], object]:
    """The pass over several inputs in turn; a CPU keeps the results for a turn, so that its inner caches hold neither.

    In a step a result is kept for the backward and the next one goes elsewhere; the same few blocks again and again
    would show the speed of a cache.
    """
    sets = _gpu_sets(s, num_bytes) if s.gpu else max(1, min(CPU_SETS, CPU_ROTATE_BYTES // num_bytes))
    x, y = s.random(rows, width, dtype=dtype), s.random(rows, width, dtype=dtype)
    calls = [build(s.torch, x.clone() if sets > 1 else x, y.clone() if sets > 1 else y) for _ in range(sets)]
    kept: list[object] = [None] * sets

    def call(i: int) -> None:
        kept[i % sets] = calls[i % sets](i)

    return (lambda i: calls[i % sets](i)) if s.gpu else call


def _gpu_sets(s: Session, num_bytes: int) -> int:
    """Inputs that exceed a GPU's second-level cache together."""
    return 1 if s.setting.tiny else max(1, min(GPU_SETS, int(ROTATE_BYTES / num_bytes)))


Build = Callable[[Any, Tensor, Tensor], Callable[[int], object]]
Bytes = Callable[[int], float]


def _each(count: float) -> Bytes:
    return lambda element: element * count


def _grown(torch: Any, x: Tensor, function: Callable[..., Tensor], *more: Tensor) -> Callable[[int], object]:  # noqa: ANN401
    """The backward of `function` at x (and more), everything but the graph's making."""
    inputs = [t.detach().requires_grad_() for t in (x, *more)]
    out = function(*inputs)
    gradient = torch.randn_like(out)
    return lambda _: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _tracked(x: Tensor, *more: Tensor) -> list[Tensor]:
    """Inputs that need gradients, so that a forward pays for its graph as in training."""
    return [t.detach().requires_grad_() for t in (x, *more)]


def _softmax_forward(torch: Any, x: Tensor, _: Tensor) -> Callable[[int], object]:  # noqa: ANN401
    (a,) = _tracked(x.float())
    return lambda _: torch.log_softmax(a, -1)


def _softmax_backward(torch: Any, x: Tensor, _: Tensor) -> Callable[[int], object]:  # noqa: ANN401
    return _grown(torch, x.float(), lambda a: torch.log_softmax(a, -1))


def _norm(torch: Any, x: Tensor) -> Callable[..., Tensor]:  # noqa: ANN401
    weight = torch.ones(x.shape[-1], device=x.device, dtype=x.dtype, requires_grad=True)

    def norm(a: Tensor, w: Tensor = weight) -> Tensor:
        return torch.nn.functional.layer_norm(a, (a.shape[-1],), w)

    return norm


def _zero(_: Any, x: Tensor, __: Tensor) -> Callable[[int], object]:  # noqa: ANN401
    return lambda _: x.zero_()


def _norm_forward(torch: Any, x: Tensor, _: Tensor) -> Callable[[int], object]:  # noqa: ANN401
    (a,), norm = _tracked(x), _norm(torch, x)
    return lambda _: norm(a)


def _norm_backward(torch: Any, x: Tensor, _: Tensor) -> Callable[[int], object]:  # noqa: ANN401
    norm = _norm(torch, x)
    return _grown(torch, x, norm, torch.ones(x.shape[-1], device=x.device, dtype=x.dtype))


def _forward(function: Callable[..., Tensor], inputs: int = 2) -> Build:
    def build(_: Any, x: Tensor, y: Tensor) -> Callable[[int], object]:  # noqa: ANN401
        args = _tracked(x, y)[:inputs]
        return lambda _: function(*args)

    return build


def _silu_backward(torch: Any, x: Tensor, y: Tensor) -> Callable[[int], object]:  # noqa: ANN401
    return lambda _: torch.ops.aten.silu_backward(x, y)


def _cat(torch: Any, x: Tensor, _: Tensor) -> Callable[[int], object]:  # noqa: ANN401
    (a,), half = _tracked(x), x.shape[-1] // 2
    return lambda _: torch.cat((a[:, half:], a[:, :half]), -1)


def _cast(torch: Any, x: Tensor, _: Tensor) -> Callable[[int], object]:  # noqa: ANN401
    other = torch.bfloat16 if x.dtype == torch.float32 else torch.float32
    return lambda _: x.to(other)


def _powers(_: Any, x: Tensor, __: Tensor) -> Callable[[int], object]:  # noqa: ANN401
    (a,) = _tracked(x)
    return lambda _: a.pow(2)


def _silu(torch: Any, x: Tensor, _: Tensor) -> Callable[[int], object]:  # noqa: ANN401
    (a,) = _tracked(x)
    return lambda _: torch.nn.functional.silu(a)


# name -> simulator's stream, builder, bytes read and written an element (by its size), launches
PASSES: dict[str, tuple[str, Build, Bytes, Bytes, int]] = {
    "add": ("elementwise", _forward(lambda x, y: x + y), _each(2), _each(1), 1),
    "mul": ("elementwise", _forward(lambda x, y: x * y), _each(2), _each(1), 1),
    "silu": ("elementwise", _silu, _each(1), _each(1), 1),
    "silu_backward": ("elementwise", _silu_backward, _each(2), _each(1), 1),
    "neg": ("elementwise", _forward(lambda x: -x, 1), _each(1), _each(1), 1),
    "pow": ("elementwise", _powers, _each(1), _each(1), 1),
    "clone": ("copy", _forward(lambda x: x.clone(), 1), _each(1), _each(1), 1),
    "cat": ("copy", _cat, _each(1), _each(1), 1),
    "transpose": ("copy", _forward(lambda x: x.t().contiguous(), 1), _each(1), _each(1), 1),
    "row_sum": ("reduce", _forward(lambda x: x.sum(-1), 1), _each(1), _each(0), 1),
    "column_sum": ("reduce", _forward(lambda x: x.sum(0), 1), _each(1), _each(0), 1),
    "norm_forward": ("norm_forward", _norm_forward, _each(1), _each(1), 1),
    "norm_backward": ("norm_backward", _norm_backward, _each(4), _each(1), 3),
    "softmax_forward": ("softmax", _softmax_forward, lambda _: 8, lambda _: 4, 1),
    "softmax_backward": ("softmax", _softmax_backward, lambda _: 12, lambda _: 4, 1),
    "zero": ("memset", _zero, _each(0), _each(1), 1),
    "cast": ("cast", _cast, _each(1), lambda e: 6 - e, 1),
}


# -- loss, embedding, optimizer ------------------------------------------------------------------------------------


def loss_items(s: Session) -> Iterator[Item]:
    """Cross-entropy as eager software runs it: a cast to fp32, log-softmax, pick."""
    gpu, cpu = [(4096, 32000), (4096, 128256), (8192, 50257)], [(128, 1000), (512, 8192), (256, 4096), (1024, 4096)]
    for tokens, vocab in [(64, 256), (128, 512)] if s.setting.tiny else gpu if s.gpu else cpu:
        yield partial(cross_entropy, s, tokens, vocab)
    tokens_of, widths, rows = ((512, 8192), (1024, 4096), 32000) if s.gpu else ((512, 8192), (64, 256), 1000)
    if s.setting.tiny:
        tokens_of, widths, rows = (64, 256), (64, 256), 1000
    for tokens, width in product(tokens_of, widths):
        yield partial(embedding, s, tokens, width, rows)


def cross_entropy(s: Session, tokens: int, vocab: int) -> None:
    """The whole loss, forward and backward."""
    if not s.fits(24 * tokens * vocab):
        return
    torch, dtype = s.torch, "bf16" if s.gpu else "fp32"
    logits = s.random(tokens, vocab, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=s.setting.device)

    def loss(_: int) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.float(), targets)

    shape: Shape = {"tokens": tokens, "vocab": vocab, "dtype": dtype}
    s.record("cross_entropy_forward", loss, shape)
    made = loss(0)
    s.record("cross_entropy_backward", lambda _: torch.autograd.grad(made, logits, retain_graph=True), shape)


def embedding(s: Session, tokens: int, width: int, vocab: int) -> None:
    """Rows of a table: looked up, and their gradients scattered into a zeroed table."""
    torch, dtype = s.torch, "bf16" if s.gpu else "fp32"
    table = s.random(vocab, width, dtype=dtype).requires_grad_()
    ids = torch.randint(0, vocab, (tokens,), device=s.setting.device)
    rows, whole = tokens * width * DTYPE_BYTES[dtype], vocab * width * DTYPE_BYTES[dtype]
    shape: Shape = {"elements": tokens * width, "width": width, "vocab": vocab, "dtype": dtype}
    shape |= {"read_bytes": rows, "write_bytes": rows}
    looked_up = {"op": "embedding", "stream_op": "embedding_forward", "launches": 1}
    s.record("stream", lambda _: torch.nn.functional.embedding(ids, table), shape | looked_up)
    gradient, scatter = s.random(tokens, width, dtype=dtype), torch.ops.aten.embedding_dense_backward
    scattered = {"op": "embedding_backward", "stream_op": "embedding_backward", "launches": 6, "zeroed_bytes": whole}
    s.record("stream", lambda _: scatter(gradient, ids, vocab, -1, False), shape | scattered)  # noqa: FBT003


def optimizer_items(s: Session) -> Iterator[Item]:
    """AdamW on fp32 parameters in tensors of a model's sizes."""
    sizes = (2**14, 2**16) if s.setting.tiny else (2**24, 2**28) if s.gpu else (2**18, 2**23, 2**21)
    for parameters, impl in product(sizes, ("fused", "foreach")):
        yield partial(adamw, s, parameters, impl)


def adamw(s: Session, parameters: int, impl: str) -> None:
    """One optimizer step over 16 tensors."""
    if not s.fits(24 * parameters):
        return
    torch = s.torch
    tensors = [torch.nn.Parameter(s.random(parameters // 16)) for _ in range(16)]
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    optimizer = torch.optim.AdamW(tensors, lr=1e-4, **{impl: True})
    shape: Shape = {"impl": impl, "parameters": parameters, "tensors": len(tensors), "dtype": "fp32"}
    s.record("adamw", lambda _: optimizer.step(), shape)


# -- the host ------------------------------------------------------------------------------------------------------

DISPATCH_CALLS = 200


def host_items(s: Session) -> Iterator[Item]:
    """Host time of one operator, and of one eager Llama block that is all overhead."""
    yield partial(dispatch, s)
    yield partial(eager_block, s)
    if s.gpu:
        yield partial(graph_launches, s)


def dispatch(s: Session) -> None:
    """Host seconds of one eager operator on eight numbers, and of a small linear layer with its module."""
    torch = s.torch
    a = torch.ones(8, device=s.setting.device)
    x, linear = torch.ones(8, 8, device=s.setting.device), torch.nn.Linear(8, 8).to(s.setting.device)
    calls: dict[str, Callable[[], object]] = {"add_": lambda: a.add_(1), "mul_out": lambda: a * 1}
    calls["linear_8x8"] = lambda: linear(x)
    for name, call in calls.items():
        s.record("host_dispatch", partial(_many, call), {"op": name}, per=DISPATCH_CALLS)


def _many(call: Callable[[], object], _: int) -> None:
    for _ in range(DISPATCH_CALLS):
        call()


def graph_launches(s: Session) -> None:
    """Interval of tiny kernels in a CUDA graph: what a launch costs the device."""
    torch = s.torch
    a, graph = torch.ones(8, device=s.setting.device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _many(lambda: a.add_(1), 0)
    s.record("graph_kernel_200", lambda _: graph.replay(), {})


def eager_block(s: Session) -> None:
    """One Llama block of eight tokens and width 16, forward and backward: nothing but overhead."""
    block, x = tiny_block(s.torch, s.setting.device)
    s.record("eager_block", lambda _: block(x), {"phase": "forward"})
    out = block(x)
    gradient, inputs, grad = s.torch.ones_like(out), [x, *block.parameters()], s.torch.autograd.grad
    s.record("eager_block", lambda _: grad(out, inputs, gradient, retain_graph=True), {"phase": "backward"})


def tiny_block(torch: Any, device: str) -> tuple[Any, Tensor]:  # noqa: ANN401
    """A block whose arithmetic is nothing, so that its time is the host's."""
    functional, nn = torch.nn.functional, torch.nn
    width, heads = 16, 2

    class Block(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
            self.qkvo = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
            self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

        def _rotated(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return x * 0.5 + torch.cat((-b, a), -1) * 0.5

        def forward(self, x: Tensor) -> Tensor:
            y = self.norms[0](x)
            q, k, v = (p(y).view(1, -1, heads, width // heads).transpose(1, 2) for p in self.qkvo[:3])
            o = functional.scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True)
            x = x + self.qkvo[3](o.transpose(1, 2).reshape(1, -1, width))
            y = self.norms[1](x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    dtype = torch_dtype(torch, "fp32")
    return Block().to(device), torch.randn(1, 8, width, device=device, dtype=dtype, requires_grad=True)
