"""Benches of libraries beside torch, and of formats that torch has products of but no module: what no fit reads yet.

Each is measured where its library is installed; what then fails is a line that says why. The calls are those of the libraries'
own tests: NVIDIA/TransformerEngine tests/pytorch, state-spaces/mamba tests/ops, pytorch
test/test_scaled_matmul_cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any, Final

from validate.benches import Item, Shape, Tensor
from validate.benches.host import DISPATCH_CALLS
from validate.benches.products import FP8_CAPABILITY
from validate.stopwatch import Session

BLACKWELL: Final = (10, 0)
SCANS: Final = tuple(product((64, 128), (64, 80), (128, 256)))  # heads, channels of a head, states
CHUNK: Final = 128  # tokens that a chunk of the scan has
TE: Final = "transformer_engine.pytorch"


def library_items(s: Session) -> Iterator[Item]:
    """Of one GPU, the cheapest first."""
    if not s.gpu:
        return
    able = tuple(s.torch.cuda.get_device_capability())
    for name, needs in _FORMATS.items():
        if able >= needs:
            yield partial(in_blocks, s, name)
    if installed(TE):
        for dtype in ("bf16", *(("fp8",) if able >= FP8_CAPABILITY else ())):
            yield partial(te_linear, s, dtype)
        yield partial(te_experts, s)
        if able >= BLACKWELL:
            yield partial(te_cast, s)
    if installed("mamba_ssm"):
        for case in ((4, 16, 16),) if s.setting.tiny else SCANS:
            yield partial(scan, s, *case)


def installed(name: str) -> bool:
    """Whether a library is there, without loading it."""
    return find_spec(name.partition(".")[0]) is not None


def _transformer_engine() -> Any:  # noqa: ANN401  a library
    import transformer_engine.pytorch as te

    return te


def _scans() -> Any:  # noqa: ANN401  a library
    from mamba_ssm.ops.triton import ssd_combined

    return ssd_combined


def _norms() -> Any:  # noqa: ANN401  a library
    from mamba_ssm.ops.triton import layernorm_gated

    return layernorm_gated


def _convolutions() -> Any:  # noqa: ANN401  a library
    import causal_conv1d

    return causal_conv1d


def _library(s: Session, load: Callable[[], Any], kind: str, shape: Shape) -> Any:  # noqa: ANN401  a library
    """The library; where it does not load, that is written instead of a time."""
    try:
        return load()
    except (ImportError, OSError) as exc:  # a library of CUDA's that is not there is an OSError
        s.failed(kind, exc, shape)
        return None


# --- products of formats that are scaled by blocks


def _rows_of_128(torch: Any, m: int, n: int, k: int, device: str) -> tuple[Tensor, ...]:  # noqa: ANN401
    """fp8: a scale for each 128 numbers of a row of x, for each 128 x 128 of a weight; scales lie with rows innermost."""
    a, b = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
    return a, b.t(), torch.ones(k // 128, m, device=device).t(), torch.ones(n // 128, k // 128, device=device).t()


def _mxfp8(torch: Any, m: int, n: int, k: int, device: str) -> tuple[Tensor, ...]:  # noqa: ANN401
    a, b = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
    ones = partial(torch.full, fill_value=127, dtype=torch.uint8, device=device)  # 2^0 of a dtype that is an exponent
    return a, b.t(), *(ones((rows * k // 32,)).view(torch.float8_e8m0fnu) for rows in (m, n))


def _nvfp4(torch: Any, m: int, n: int, k: int, device: str) -> tuple[Tensor, ...]:  # noqa: ANN401
    """Two numbers a byte, and a scale of fp8 for each 16, in the tiles that tensor cores read."""
    a, b = (
        torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device=device).view(torch.float4_e2m1fn_x2)
        for rows in (m, n)
    )
    return a, b.t(), *(torch.ones(rows * k // 16, device=device).to(torch.float8_e4m3fn) for rows in (m, n))


_MADE: Final[dict[str, Callable[..., tuple[Tensor, ...]]]] = {
    "blocks of 128": _rows_of_128,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}
_FORMATS: Final = {"blocks of 128": (9, 0), "mxfp8": BLACKWELL, "nvfp4": BLACKWELL}


def in_blocks(s: Session, scaled_by: str) -> None:
    """torch._scaled_mm, one second long."""
    side = 256 if s.setting.tiny else 8192
    shape: Shape = {"m": side, "n": side, "k": side, "layout": "tn", "flop": 2 * side**3}
    shape |= {"dtype": "fp4" if scaled_by == "nvfp4" else "fp8", "scaled_by": scaled_by, "fast_accumulation": True}
    torch = s.torch
    try:
        a, b, *scales = _MADE[scaled_by](torch, side, side, side, s.setting.device)
    except (AttributeError, RuntimeError) as exc:  # a torch without the dtype
        s.failed("gemm_scaled", exc, shape)
        return
    multiply, bf16 = torch._scaled_mm, torch.bfloat16  # noqa: SLF001  no public name
    call = partial(multiply, a, b, *scales, out_dtype=bf16, use_fast_accum=True)
    s.sustained("gemm_scaled", lambda _: call(), shape, seconds=0.01 if s.setting.tiny else 1.0)


# --- Transformer Engine


def te_linear(s: Session, dtype: str) -> None:
    """Host seconds of its linear layer on 16 tokens, forward and backward; and of the same calls in a CUDA graph."""
    shape: Shape = {"op": "te.Linear", "dtype": dtype}
    te = _library(s, _transformer_engine, "host_module", shape)
    if te is None:
        return
    torch = s.torch
    layer = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device=s.setting.device)
    x = s.random(16, 64, dtype="bf16").requires_grad_()

    def forward() -> Tensor:
        with te.fp8_autocast(enabled=dtype == "fp8"):
            return layer(x)

    def both() -> None:
        forward().sum().backward()

    for phase, call in {"forward": forward, "forward and backward": both}.items():
        many = partial(_many, call)
        s.record("host_module", many, {**shape, "phase": phase}, per=DISPATCH_CALLS // 10, by_host=True)
    quick = s.short_times(lambda _: forward())
    if quick:
        s.emit("graph_module", sorted(quick), shape)


def _many(call: Callable[[], object], _: int) -> None:
    for _ in range(DISPATCH_CALLS // 10):
        call()


def te_experts(s: Session) -> None:
    """A mixture's MLP by its operators, which it fuses where it can: two grouped products around a scaled SwiGLU."""
    experts, tokens, d, f = (2, 64, 32, 64) if s.setting.tiny else (16, 8192, 4096, 1536)
    shape: Shape = {"experts": experts, "tokens": tokens, "d_model": d, "d_ff": f, "dtype": "bf16"}
    te = _library(s, _transformer_engine, "te_experts", shape)
    if te is None:
        return
    torch = s.torch
    try:
        grouped = partial(te.ops.GroupedLinear, experts, bias=False, device=s.setting.device, dtype=torch.bfloat16)
        layers = te.ops.Sequential(grouped(d, 2 * f), te.ops.ScaledSwiGLU(), grouped(f, d))
    except (AttributeError, TypeError) as exc:  # an older one
        s.failed("te_experts", exc, shape)
        return
    x = s.random(tokens, d, dtype="bf16").requires_grad_()
    weights = torch.ones(tokens, device=s.setting.device)
    counts = torch.full((experts,), tokens // experts, dtype=torch.int64, device=s.setting.device)
    s.record("te_experts", lambda _: layers(x, counts, weights, counts), {**shape, "phase": "forward"}, graph=True)
    s.record(
        "te_experts",
        lambda _: layers(x, counts, weights, counts).backward(x.detach()),
        {**shape, "phase": "forward and backward"},
    )


def te_cast(s: Session) -> None:
    """A tensor to NVFP4, by rows and by columns."""
    rows, width = (64, 64) if s.setting.tiny else (8192, 8192)
    shape: Shape = {"op": "nvfp4", "elements": rows * width}
    te = _library(s, _transformer_engine, "te_cast", shape)
    if te is None:
        return
    x = s.random(rows, width, dtype="bf16")
    try:
        quantise = te.NVFP4Quantizer()
    except (AttributeError, TypeError) as exc:
        s.failed("te_cast", exc, shape)
        return
    s.record("te_cast", lambda _: quantise(x), shape, graph=True)


# --- Mamba-2


def scan(s: Session, heads: int, channels: int, states: int) -> None:
    """The scan of a layer, its causal convolution and its gated norm, forward and backward."""
    batch, tokens, groups = (1, 256, 1) if s.setting.tiny else (1, 8192, 8)
    width = heads * channels
    shape: Shape = {"batch": batch, "tokens": tokens, "heads": heads, "channels": channels, "states": states}
    shape |= {"groups": groups, "chunk": CHUNK, "dtype": "bf16"}
    x = s.random(batch, tokens, heads, channels, dtype="bf16")
    dt, decay = s.random(batch, tokens, heads, dtype="bf16"), -s.random(heads).abs()
    b, c = (s.random(batch, tokens, groups, states, dtype="bf16") for _ in "bc")
    if (ssd := _library(s, _scans, "mamba_scan", shape)) is not None:
        call = partial(ssd.mamba_chunk_scan_combined, A=decay, chunk_size=CHUNK, dt_softplus=True)
        _both_ways(s, "mamba_scan", lambda x, dt, b, c: call(x, dt, B=b, C=c), (x, dt, b, c), shape)
    if (conv := _library(s, _convolutions, "mamba_convolution", shape)) is not None:
        mixed = s.random(batch, width + 2 * groups * states, tokens, dtype="bf16")
        taps = s.random(width + 2 * groups * states, 4, dtype="bf16")
        convolve = partial(conv.causal_conv1d_fn, activation="silu")
        _both_ways(s, "mamba_convolution", convolve, (mixed, taps), shape)
    if (gated := _library(s, _norms, "mamba_norm", shape)) is not None:
        norm = gated.RMSNorm(width, norm_before_gate=False, group_size=width // groups, device=s.setting.device)
        y, z = (s.random(batch, tokens, width, dtype="bf16") for _ in "yz")
        _both_ways(s, "mamba_norm", norm, (y, z), shape)


def _both_ways(s: Session, kind: str, call: Callable[..., Tensor], inputs: tuple[Tensor, ...], shape: Shape) -> None:
    """Forward, and backward of everything that has a gradient."""
    inputs = tuple(one.requires_grad_() for one in inputs)
    if s.record(kind, lambda _: call(*inputs), {**shape, "phase": "forward"}) is None:
        return
    made = call(*inputs)
    gradient, grad = s.torch.ones_like(made), s.torch.autograd.grad
    s.record(kind, lambda _: grad(made, inputs, gradient, retain_graph=True), {**shape, "phase": "backward"})
