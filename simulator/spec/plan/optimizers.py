"""Optimizers: what each keeps of a parameter, and what its kernels read and write. Another one is another value here.

A pass is what one kernel reads and what it writes an element: p parameter, g gradient, m and v state, t temporary of the
state's dtype, f of fp32, h of 16 bits, 8 and 4 states of so many bits. Without `foreach` there are fused kernels alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal[
    "adamw",
    "adam",
    "sgd",
    "sgd_momentum",
    "adam8bit",
    "torchao_adam8bit",
    "adam4bit",
    "lion",
    "lion8bit",
    "paged_adamw",
    "paged_adam8bit",
    "paged_lion",
    "paged_lion8bit",
    "adafactor",
    "muon",
    "galore",
    "lamb",
]
Pass = tuple[str, str]

_MIN_NUMEL: Final = 4096  # smaller tensors keep wide states (bitsandbytes: min_8bit_size; torchao: optim/adam.py)
PAGED_NUMEL: Final = 100_000  # smaller tensors' states are ordinary ones (get_state_buffer)
_SCALES: Final = {8: 256, 4: 128}  # elements that share an fp32 scale
# Launches in whose time bitsandbytes' Python steps a tensor (experiments/host_costs.py: 52 us on a Xeon of 2023, and its launch), ± 50 %
WAITED_LAUNCHES: Final = 3.5
_LEVELS_BYTES: Final = 16 * 4  # torchao keeps the 16 levels of four bits beside each state (OptimState4bit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What one optimizer keeps and does.

    moments: tensors of state, of the plan's dtype or of so many bits. matrices: steps whole matrices of layers its own
    way, and all else as AdamW. loops: launches its kernels tensor by tensor. steps: fused, it counts steps on the GPU.
    paged: states of larger tensors are in unified memory, beside the caching allocator (bitsandbytes, optim/optimizer.py).
    waits: the host waits for the device behind each tensor (the same file's `step`).
    """

    fused: tuple[Pass, ...]
    foreach: tuple[Pass, ...] = ()
    moments: int = 0
    bits: int = 0
    matrices: bool = False
    loops: bool = False
    steps: bool = False
    paged: bool = False
    waits: bool = False

    def on_gpu(self, numel: int, size: int) -> list[int]:
        """The same without what is paged."""
        return self.state(numel, size)[self.moments if self.paged and numel >= PAGED_NUMEL else 0 :]

    def wide(self, numel: int) -> list[int]:
        """Bytes on the GPU of states in fp32."""
        return [] if self.paged and numel >= PAGED_NUMEL else [numel * 4] * self.moments

    def state(self, numel: int, size: int) -> list[int]:
        """Bytes of the states of a tensor. size: bytes of the plan's dtype of states."""
        if not self.bits:
            return [numel * size] * self.moments
        block = _SCALES[self.bits]
        if numel < _MIN_NUMEL or (self.bits == 4 and numel % block):
            return [numel * 4] * self.moments
        levels = [_LEVELS_BYTES] * self.moments if self.bits == 4 else []
        return [*[numel * self.bits // 8] * self.moments, *[-(-numel // block) * 4] * self.moments, *levels]


_ADAM: Final = (("gm", "m"), ("v", "v"), ("gv", "v"), ("v", "t"), ("t", "t"), ("t", "t"), ("mtp", "p"))
# decay, lerp of m, decay of v, addcmul of v, root, divide, add epsilon, addcdiv of p
_ADAMW: Final = (("p", "p"), *_ADAM)
# transformers' Adafactor (optimization.py): square, epsilon, two means, outer product, times g, its norm, clip, rate, norm of p,
# sign, sum
_ADAFACTOR: Final = (("g", "f"), ("f", "f"), ("f", ""), ("f", ""), ("", "f"), ("fg", "f"), ("f", ""), ("f", "f"), ("f", "f"),
                     ("p", ""), ("f", "f"), ("fp", "p"))  # fmt: skip

# DeepSpeed's LAMB tensor by tensor. Fused (csrc/lamb/fused_lamb_cuda_kernel.cu): moments and the squares of weight and update, their
# sums, the step. As runtime/fp16/onebit/lamb.py has it before `freeze_step`: moments, norm of the weight, update with decay, its
# norm, their ratio, the step
_LAMB_FUSED: Final = (("pgmv", "mv"), ("", ""), ("pmv", "p"))
_LAMB: Final = (("m", "m"), ("gm", "m"), ("v", "v"), ("gv", "v"), ("p", "t"), ("t", ""), ("", ""), ("v", "t"), ("t", "t"),
                ("mt", "t"), ("p", "t"), ("tt", "t"), ("t", "t"), ("t", ""), ("", ""), ("", ""), ("t", "t"), ("pt", "p"))  # fmt: skip
# From then on: the old moment kept; the moment, scaled; behind the compressed sum scaled back; the gradient that it implies, and the
# fresh variance; root and epsilon; update with decay, its norm; root of the fresh variance; largest ratio of both; share of the
# update without decay; the step
ONE_BIT_LAMB: Final[tuple[Pass, ...]] = (
    ("m", "t"), ("m", "m"), ("gm", "m"), ("m", "m"), ("m", "m"), ("t", "t"), ("mt", "t"), ("t", "t"), ("f", "f"), ("ft", "f"),
    ("v", "t"), ("t", "t"), ("mt", "t"), ("p", "t"), ("tt", "t"), ("t", "t"), ("t", ""), ("", ""), ("f", "t"), ("t", "t"),
    ("tt", "t"), ("t", ""), ("t", "t"), ("t", ""), ("", ""), ("", ""), ("t", "t"), ("pt", "p"),
)  # fmt: skip

OPTIMIZERS: Final[dict[str, Optimizer]] = {
    "adamw": Optimizer(fused=(("pgmv", "pmv"),), foreach=_ADAMW, moments=2, steps=True),
    "adam": Optimizer(fused=(("pgmv", "pmv"),), foreach=_ADAM, moments=2, steps=True),
    "sgd": Optimizer(fused=(("pg", "p"),), foreach=(("gp", "p"),)),
    "sgd_momentum": Optimizer(fused=(("pgm", "pm"),), foreach=(("m", "m"), ("gm", "m"), ("mp", "p")), moments=1),
    "adam8bit": Optimizer(fused=(("pg88", "p88"),), moments=2, bits=8, loops=True, waits=True),
    "torchao_adam8bit": Optimizer(fused=(("pg88", "p88"),), moments=2, bits=8, loops=True),
    "adam4bit": Optimizer(fused=(("pg44", "p44"),), moments=2, bits=4, loops=True),
    "lion": Optimizer(fused=(("pgm", "pm"),), moments=1, loops=True, waits=True),
    "lion8bit": Optimizer(fused=(("pg8", "p8"),), moments=1, bits=8, loops=True, waits=True),
    "paged_adamw": Optimizer(fused=(("pgmv", "pmv"),), moments=2, paged=True, loops=True, waits=True),
    "paged_adam8bit": Optimizer(fused=(("pg88", "p88"),), moments=2, bits=8, paged=True, loops=True, waits=True),
    "paged_lion": Optimizer(fused=(("pgm", "pm"),), moments=1, paged=True, loops=True, waits=True),
    "paged_lion8bit": Optimizer(fused=(("pg8", "p8"),), moments=1, bits=8, paged=True, loops=True, waits=True),
    "adafactor": Optimizer(fused=_ADAFACTOR, loops=True),
    "muon": Optimizer(fused=(("pgmv", "pmv"),), foreach=_ADAMW, moments=2, matrices=True, steps=True),
    "lamb": Optimizer(fused=_LAMB_FUSED, foreach=_LAMB, moments=2, loops=True),
    "galore": Optimizer(fused=_ADAMW, moments=2, matrices=True, loops=True),
}

NEWTON_SCHULZ_STEPS: Final = 5  # torch.optim.Muon (torch/optim/_muon.py)
# Muon a matrix: lerp of the moment, of the gradient towards it, decay and update of the parameter
MUON: Final[tuple[Pass, ...]] = (("gm", "m"), ("gm", "t"), ("p", "p"), ("ph", "p"))


def matrix_state(kind: str, shape: tuple[int, ...], rank: int, size: int, master_bytes: int) -> list[int]:
    """Bytes of the states of a matrix of a layer (or of as many as its first dimensions say).

    Muon: a moment in the parameter's dtype. GaLore: two of the projected gradient, and the projection
    (galore_torch/galore_projector.py, "std": the longer side stays). Adafactor: means of rows and columns in fp32.
    """
    *many, rows, columns = shape
    count = 1
    for number in many:
        count *= number
    if kind == "adafactor":
        return [count * rows * 4, count * columns * 4]
    if kind == "muon":
        return [count * rows * columns * master_bytes]
    short, long = sorted((rows, columns))
    rank = min(rank, short)
    return [count * long * rank * size] * 2 + [count * short * rank * master_bytes]
