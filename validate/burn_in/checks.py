"""What a burn-in repeats: work whose result is known to the last bit. A check returns what is wrong, nothing where all is well.

A product is compared with its own first result bit by bit, since the same kernel on the same numbers adds in the same order;
the first result with the product of its factors and a vector (Freivalds, 1977: a wrong matrix hides from a random one at most
half of the time, and other ranks' results are compared as well); numbers of collectives are integers that fp32 adds exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from validate import faults
from validate.benches.products import has_fp8, scaled
from validate.stopwatch import Session, torch_dtype

Tensor = Any  # torch is loaded by the worker
MEMORY_SHARE: Final = 0.6  # of what may be taken: products and messages need the rest
CPU_BYTES: Final = 2**28  # of a rank on a CPU, whose host's memory has a controller of its own to tell
CHUNK_BYTES: Final = 2**28
# 2^64 over the golden ratio: neighbours get patterns that share no bits in order
ODD: Final = 0x9E3779B97F4A7C15 - 2**64
# Of fp8's fast accumulation on Hopper, which keeps 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.5.2)
FAST: Final = 2.0**-13
WIDE: Final = 1009  # values of messages: a prime, so that blocks of any size differ


@dataclass(frozen=True, slots=True)
class Check:
    """name: what is said of it. play(round): what is wrong. digest: of the first result, to be compared among ranks."""

    name: str
    play: Callable[[int], str]
    digest: int | None = None


def checks_of(s: Session) -> Iterator[Check]:
    """What this device can be asked."""
    side = 64 if s.setting.tiny else 4096 if s.gpu else 512
    for dtype in ("bf16", "fp16", "fp32", *(("fp8",) if has_fp8(s) else ())) if s.gpu else ("fp32", "bf16"):
        yield product(s, side, dtype)
    yield memory(s)
    if s.gpu:
        yield copies(s, 2**16 if s.setting.tiny else 2**26)
    if s.num_ranks > 1:
        yield from collectives(s, 2**10 if s.setting.tiny else 2**24 if s.gpu else 2**18)


# --- products


def product(s: Session, side: int, dtype: str) -> Check:
    """The same product in every round."""
    torch = s.torch
    generator = torch.Generator(device="cpu").manual_seed(side)  # the same numbers on every rank
    a, b = (torch.randn(side, side, generator=generator).to(s.setting.device, torch_dtype(torch, dtype)) for _ in "ab")
    multiply = _multiply(s, a, b, dtype)
    first = multiply()
    wrong = _freivalds(torch, a, b, first, FAST if dtype == "fp8" else torch.finfo(torch.float32).eps)

    def play(_: int) -> str:
        return wrong or _different(torch, faults.corrupted(multiply()), first)

    return Check(f"product {dtype}", play, digest(torch, first))


def _multiply(s: Session, a: Tensor, b: Tensor, dtype: str) -> Callable[[], Tensor]:
    torch = s.torch
    if dtype != "fp8":
        torch.backends.cuda.matmul.allow_tf32 = False
        return lambda: a @ b.t()
    call = scaled(s, [a], [b.t()])
    return lambda: call(0)


def _freivalds(torch: Any, a: Tensor, b: Tensor, c: Tensor, unit: float) -> str:  # noqa: ANN401
    """Whether c is a bᵀ but for rounding, by a vector of ±1 in fp64.

    Of an element the rounding is at most half a unit of its last place, and k units of its accumulator of the sum of absolute values
    (Higham, Accuracy and Stability, section 3.5); twice that is allowed.
    """
    k = a.shape[1]
    a, b, given = a.double(), b.double(), c.double()
    signs = torch.where(torch.arange(c.shape[1], device=c.device) % 3 == 0, 1.0, -1.0).double()
    off = (given @ signs - a @ (b.t() @ signs)).abs()
    eps = torch.finfo(c.dtype).eps
    room = eps * given.abs().sum(1) + 2 * k * unit * (a.abs() @ b.abs().sum(0))
    wrong = int((off > room).sum() + (~torch.isfinite(off)).sum())
    return f"{wrong} of {len(off)} rows are not the product of their factors" if wrong else ""


def digest(torch: Any, tensor: Tensor) -> int:  # noqa: ANN401
    """A number of all bits and their places."""
    words = tensor.contiguous().view(-1).view(torch.int16).long()
    places = torch.arange(1, 2 * len(words), 2, device=words.device)
    return int((words * places).sum())


def _different(torch: Any, found: Tensor, wanted: Tensor) -> str:  # noqa: ANN401
    if torch.equal(found, wanted):
        return ""
    off = found.double() - wanted.double()
    count, largest = int((off != 0).sum() + off.isnan().sum()), float(off.abs().nan_to_num(float("inf")).max())
    return f"{count} of {wanted.numel()} elements differ from the first round, by up to {largest:.3g}"


# --- memory and copies


def memory(s: Session) -> Check:
    """Most of the memory, written with a pattern of round and place, and read back when all is written."""
    torch = s.torch
    room = MEMORY_SHARE * s.free_bytes if s.gpu else min(CPU_BYTES, MEMORY_SHARE * s.free_bytes)
    chunk = 2**16 if s.setting.tiny else CHUNK_BYTES if s.gpu else CHUNK_BYTES // 16
    count = 2 if s.setting.tiny else max(1, int(room / chunk))
    chunks = [torch.empty(chunk // 8, dtype=torch.int64, device=s.setting.device) for _ in range(count)]
    places = torch.arange(chunk // 8, dtype=torch.int64, device=s.setting.device)

    def play(number: int) -> str:
        for index, one in enumerate(chunks):
            torch.mul(places, ODD, out=one).bitwise_xor_(_mask(number, index))
        faults.corrupted(chunks[0])
        wrong = sum(
            int((one.bitwise_xor_(_mask(number, index)) != places * ODD).sum()) for index, one in enumerate(chunks)
        )
        return f"{wrong} of {count * chunk // 8} words read back otherwise than written" if wrong else ""

    return Check("memory", play)


def _mask(number: int, index: int) -> int:
    """Every second round all bits are turned over."""
    return (index * 2654435761) ^ -(number % 2)


def copies(s: Session, num_bytes: int) -> Check:
    """To the device and back through pinned memory."""
    torch = s.torch
    there = torch.arange(num_bytes // 4, dtype=torch.int32).pin_memory()
    back = torch.empty_like(there).pin_memory()

    def play(_: int) -> str:
        on_device = there.to(s.setting.device, non_blocking=True)
        back.copy_(faults.corrupted(on_device), non_blocking=True)
        s.sync()
        wrong = int((there != back).sum())
        return f"{wrong} of {there.numel()} words came back otherwise" if wrong else ""

    return Check("copies", play)


# --- collectives


def collectives(s: Session, count: int) -> Iterator[Check]:
    """Each kind with numbers that name rank and place: sums of up to 2^24 are exact in fp32 in any order."""
    size = s.num_ranks
    count -= count % size
    for name, call in _calls(s, count).items():
        yield Check(f"{name} of {4 * count} bytes", partial(_compared, call))


def _compared(call: Callable[[int], tuple[Tensor, Tensor]], number: int) -> str:
    found, wanted = call(number)
    wrong = int((faults.corrupted(found) != wanted).sum())
    return f"{wrong} of {wanted.numel()} elements are not what the ranks sent" if wrong else ""


def _calls(s: Session, count: int) -> dict[str, Callable[[int], tuple[Tensor, Tensor]]]:
    """Result and what it must be, of a round."""
    torch, dist, size, rank = s.torch, s.torch.distributed, s.num_ranks, s.setting.rank
    places = torch.arange(count, device=s.setting.device)
    part = count // size

    def of(other: int, number: int) -> Tensor:
        return ((places + number) % WIDE + other).float()

    def all_reduce(number: int) -> tuple[Tensor, Tensor]:
        mine = of(rank, number)
        dist.all_reduce(mine)
        return mine, size * of(0, number) + size * (size - 1) / 2

    def all_gather(number: int) -> tuple[Tensor, Tensor]:
        came = torch.empty(size * part, device=s.setting.device)
        dist.all_gather_into_tensor(came, of(rank, number)[:part])
        return came, torch.cat([of(other, number)[:part] for other in range(size)])

    def reduce_scatter(number: int) -> tuple[Tensor, Tensor]:
        came = torch.empty(part, device=s.setting.device)
        dist.reduce_scatter_tensor(came, of(rank, number))
        return came, size * of(0, number)[rank * part : (rank + 1) * part] + size * (size - 1) / 2

    def all_to_all(number: int) -> tuple[Tensor, Tensor]:
        came = torch.empty(count, device=s.setting.device)
        dist.all_to_all_single(came, of(rank, number))
        return came, torch.cat([of(other, number)[rank * part : (rank + 1) * part] for other in range(size)])

    def send_recv(number: int) -> tuple[Tensor, Tensor]:
        came, before = torch.empty(count, device=s.setting.device), (rank - 1) % size
        pair = [dist.P2POp(dist.isend, of(rank, number), (rank + 1) % size), dist.P2POp(dist.irecv, came, before)]
        for request in dist.batch_isend_irecv(pair):
            request.wait()
        return came, of(before, number)

    return {f.__name__: f for f in (all_reduce, all_gather, reduce_scatter, all_to_all, send_recv)}


# --- ranks beside each other


def outvoted(digests: list[int | None]) -> list[int]:
    """Ranks whose result is not that of most; none where no result has more than half of them."""
    there = [one for one in digests if one is not None]
    usual = next((one for one in dict.fromkeys(there) if 2 * there.count(one) > len(there)), None)
    if usual is None:
        return []
    return [rank for rank, one in enumerate(digests) if one is not None and one != usual]
