"""Benches of operators that pass over memory once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

from simulator.base.kernels import DTYPE_BYTES
from validate.benches import ROTATE_BYTES, Item, Shape, Tensor, spread
from validate.stopwatch import Session

CPU_ROTATE_BYTES, CPU_SETS = 2**23, 12  # of a pass's inputs on a CPU: beyond the caches that a core has for itself
GPU_SETS = 64  # of a pass's inputs on a GPU, at most


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
    results: list[object] = [None] * sets

    def call(i: int) -> None:
        results[i % sets] = calls[i % sets](i)

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
