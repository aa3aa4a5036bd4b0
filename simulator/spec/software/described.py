"""Which software a stack's file describes: its public names, versions, and what its documents say where a run is silent.

    [[describes]]
    software = ["torchtitan"]
    versions = ["2024-07", "2025"]     # from the first on, before the second; blank: no bound
    compile = true                     # of runs with torch.compile; absent: of both
    defaults = { zero_or_fsdp = "fsdp_full" }

A name is found in free text whatever its case, as whole words. The name that stands first holds, the longest of those that
start there; of several entries with that name the one whose versions hold the version behind the name, else the newest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Final, Literal

from pydantic import Field

from simulator.base.schema import Strict
from simulator.spec.plan import DataParallel

# right behind a name; Megatron-Core's, too: core_r0.5; behind that of its engine: vLLM V1 0.8.4
_VERSION = re.compile(r"[\s(,@=v-]*(?:core[\s_-]*)?(?:[01][\s(,]+(?=v?\d+\.\d))?[rv]?(\d+(?:[.-]\d+)*)")
# a date further on, or a release
_LATER = (re.compile(r"(?<![\w.])(20\d\d(?:-\d+)*)"), re.compile(r"(?<![\w.])v?(\d+(?:\.\d+)+)"))
_TORCH = re.compile(r"(?<![a-z])(?:py)?torch[\s(=v-]*(\d+(?:\.\d+)+)", re.IGNORECASE)
_NEWEST = re.compile(r"\b(?:dev|main|master|nightly|latest|head)\b", re.IGNORECASE)
_Version = tuple[int, ...]
Nature = Literal["eager", "compiled", "fused"]  # who makes the kernels of a block
Default = str | int | bool | list[str]
COLUMNS: Final = (
    "act_ckpt", "compile", "flash_attn", "flop_convention", "global_batch", "mem_metric_detail", "micro_batch", "num_micro_batches",
    "precision", "seq_parallel", "vpp", "zero_or_fsdp",
)  # fmt: skip  # of a table of runs: those that documents of software have defaults for
FABRIC: Final = ("fabric.size_bytes", "fabric.gather_copies", "fabric.call_rank_s")


class Implementations(Strict):
    """Whose data parallelism plays which words of a table; None: the plan's own default."""

    ddp: DataParallel = "ddp"
    zero1: DataParallel | None = None
    zero: DataParallel = "fsdp2"  # zero2, zero3
    fsdp: DataParallel = "fsdp2"


class Described(Strict):
    """Software that a stack's file describes.

    software: public names; none: whatever no file names, of PyTorch's versions. family: the names are of what programs are made
    of, and which one runs is not said. versions: the first that is meant, and the first that no longer is. compile: of compiled
    runs, of others, or (None) of both. fused: of runs that only layers of hand-written kernels do. tiled: where none is named, of
    runs with tiled attention, of others, or (None) of both.
    defaults: what a blank column means by the software's documents, or a key behind its noun; a list holds all that they leave
    open.
    pipeline: micro-batches that pipelines cut a rank's whole batch into where none are stated: as many as stages, or one a sequence.
    selective: what its selective recomputation runs again; `attention` is what a tiled kernel runs again by itself.
    """

    software: tuple[str, ...] = Field(default=(), strict=False)
    family: bool = False
    versions: tuple[str, str] = Field(default=("", ""), strict=False)
    compile: bool | None = None
    fused: bool = False
    tiled: bool | None = None
    data_parallel: Implementations = Implementations()
    defaults: dict[str, Default] = {}
    selective: Literal["operators", "attention"] = "operators"
    pipeline: Literal["stated", "stages", "sequences"] = "stated"

    def holds(self, version: _Version) -> bool:
        first, beyond = map(_numbers, self.versions)
        return (not first or version >= first) and (not beyond or version < beyond)

    def compiles(self, word: str | None) -> bool:
        """It is of runs whose `compile` is `word`; a blank means what the software's documents say."""
        return self.compile is None or self.compile == ((word or self.defaults.get("compile", "n")) == "y")


def torch_in(text: str) -> _Version:
    """PyTorch's version where the text says it: `torch 2.5.1` is (2, 5, 1)."""
    found = _TORCH.search(text)
    return _numbers(found[1]) if found else ()


def named_in(text: str, entries: Iterable[Described], likely: Sequence[Described] = ()) -> list[Described]:
    """The entries whose name and versions the text shows; none where it shows no name.

    likely: of those, what the rest of a run speaks for, where the text shows no version and does not call it the newest.
    """
    found = [(span, entry) for entry in entries for span in _mentions(text, entry.software)]
    first = min((span for span, _ in found), key=lambda span: (span[0], -span[1]), default=None)
    named = [entry for span, entry in found if span == first]
    if first is None:
        return []
    version = _version_at(text, first)
    if not version and not _NEWEST.search(text):
        named = [entry for entry in named if any(entry is one for one in likely)] or named
    newest = max(_numbers(entry.versions[0]) for entry in named)
    fitting = [entry for entry in named if version and entry.holds(version)]
    return fitting or [entry for entry in named if _numbers(entry.versions[0]) == newest]


@lru_cache(maxsize=2**14)
def _mentions(text: str, names: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """The positions of the names in the text. Cached, as the rows of a table name the same software."""
    found = (_name(name).search(text) for name in names)
    return tuple(one.span() for one in found if one)


@cache
def _name(name: str) -> re.Pattern[str]:
    words = r"[^a-z0-9]+".join(re.escape(word) for word in re.split(r"[\s_-]+", name))  # ms-swift (Megatron)
    return re.compile(rf"(?<![a-z0-9]){words}(?![a-z0-9])", re.IGNORECASE)


def _version_at(text: str, name: tuple[int, int]) -> _Version:
    """Of the name that stands there, or where it stands again (of an image, `rocm6.4_vllm_0.10.1`), or further on."""
    begin, end = name
    again = re.compile(rf"{re.escape(text[begin:end])}[_:]v?(\d+(?:\.\d+)+)", re.IGNORECASE)
    found = _VERSION.match(text, end) or again.search(text, begin)
    found = found or next(filter(None, (later.search(text, end) for later in _LATER)), None)
    return _numbers(found[1]) if found else ()


def _numbers(version: str) -> _Version:
    return tuple(int(part) for part in re.findall(r"\d{1,9}", version))
