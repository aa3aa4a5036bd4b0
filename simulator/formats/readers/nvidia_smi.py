"""Reader of `nvidia-smi topo -m`: the matrix as a Host, however it was pasted.

With and without rows and columns of NICs, affinity columns, a legend, escape codes, tabs turned to blanks.
A paste that ends early is completed by symmetry where it can be; what is left open stands in `Host.missing`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

from simulator.base.errors import ClusterError, Fault
from simulator.base.schema import more_than_once, nearest
from simulator.spec.cluster.host import Gpu, Host, Nic, Path

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_GPU = re.compile(r"GPU[0-9]{1,4}")
_NVLINKS = re.compile(r"NV([0-9]{1,3})")
_ALIAS = re.compile(r"\s*(NIC[0-9]{1,4}):\s*(\S{1,64})\s*$")
# What drivers before 390 called two of them
_WORDS: Final = {"PIX": "PIX", "PXB": "PXB", "PHB": "PHB", "NODE": "NODE", "SYS": "SYS", "SOC": "SYS", "PSB": "PIX"}
_KNOWN: Final = ("X", "NV#", *_WORDS)
_AFFINITIES: Final = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID", "CPU NUMA ID")
_MOST_DEVICES = 256
_MOST_FAULTS = 20


@dataclass(slots=True)
class _Row:
    line: int
    cells: list[str]
    rest: list[str]  # the affinity columns


@dataclass(slots=True)
class _Paste:
    """A parsed matrix: columns and affinity columns of the header, rows by name, aliases of the legend."""

    place: str
    columns: list[str]
    affinities: list[str]
    rows: dict[str, _Row] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def fault(self, where: str, problem: str, remedy: str = "") -> None:
        if len(self.faults) < _MOST_FAULTS:
            self.faults.append(Fault(place=f"{self.place}: {where}", problem=problem, remedy=remedy))


_HEAD: Final = 2**18  # characters within which a header stands: what is pasted ahead of one is a prompt or a log


def looks_like_matrix(text: str) -> bool:
    """Whether a line names GPUs as the header of `nvidia-smi topo -m` does."""
    return any(_is_header(_cells(line)) for line in _lines(text[:_HEAD]) if "GPU" in line)


def read_matrix(text: str, place: str) -> Host:
    """The host that the matrix shows.

    Raises ClusterError with every fault: no header, unknown words, a pair that differs by direction, a GPU joined to
    itself, a link count of zero, GPUs that nothing joins.
    """
    paste = _paste(text, place)
    _drop_cut_cell(paste)
    paths = _paths(paste)
    if paste.faults:
        raise ClusterError(paste.faults)
    gpus, nics = _gpus(paste), [name for name in paste.columns if not _GPU.fullmatch(name)]
    return Host(
        source=place,
        format="nvidia-smi topo -m",
        gpus=tuple(gpus),
        nics=tuple(Nic(name=name, alias=paste.aliases.get(name, "")) for name in nics),
        paths=paths,
        missing=tuple(_missing(paste, paths, nics)),
    )


def _lines(text: str) -> list[str]:
    return [_ESCAPES.sub("", line).rstrip() for line in text.splitlines()]


def _cells(line: str) -> list[str]:
    """The cells of a line: at its tabs where it has them (a blank cell then is one), else at blanks."""
    if "\t" in line:
        return [cell.strip() for cell in line.split("\t")]
    for name in _AFFINITIES:
        line = line.replace(name, name.replace(" ", "_"))
    return [cell.replace("_", " ") if cell.replace("_", " ") in _AFFINITIES else cell for cell in line.split()]


def _is_header(cells: Sequence[str]) -> bool:
    names = [cell for cell in cells if cell]
    return bool(names) and bool(_GPU.fullmatch(names[0])) and not any(_is_word(name) for name in names)


def _is_word(cell: str) -> bool:
    return cell == "X" or cell in _WORDS or bool(_NVLINKS.fullmatch(cell))


def _paste(text: str, place: str) -> _Paste:
    lines = _lines(text)
    start = next((i for i, line in enumerate(lines) if _is_header(_cells(line))), None)
    if start is None:
        problem, remedy = "no header line that names GPU0, GPU1, …", "the whole output of `nvidia-smi topo -m`"
        raise ClusterError.at(place, problem, remedy)
    names = [cell for cell in _cells(lines[start]) if cell]
    paste = _Paste(place, [n for n in names if n not in _AFFINITIES], [n for n in names if n in _AFFINITIES])
    _check_columns(paste, start + 1)
    for number, line in enumerate(lines[start + 1 :], start + 2):
        if found := _ALIAS.match(line):
            paste.aliases[found[1]] = found[2]
        else:
            _take_row(paste, number, line)
    return paste


def _check_columns(paste: _Paste, line: int) -> None:
    if len(paste.columns) > _MOST_DEVICES:
        raise ClusterError.at(f"{paste.place}: line {line}", f"{len(paste.columns)} devices", f"≤ {_MOST_DEVICES}")
    for name in more_than_once(paste.columns):
        paste.fault(f"line {line}", f"column {name} appears twice", "one host's matrix")


def _take_row(paste: _Paste, number: int, line: str) -> None:
    """A row of the matrix; lines that are none (legend, prompts, comments) are passed over."""
    cells = _cells(line)
    if not cells or line.startswith("#") or line.lstrip().startswith(("Legend", "NIC Legend")):
        return
    name, values = cells[0], cells[1:]
    if name not in paste.columns:
        if any(_is_word(v) for v in values) and (_GPU.fullmatch(name) or values.count("X")) and "=" not in line:
            paste.fault(f"line {number}", f"row {name!r} has no column in the header", "one host's whole matrix")
        return
    if not any(values):
        return  # the paste ends in the row's name
    if name in paste.rows:
        paste.fault(f"line {number}", f"row {name} appears on line {paste.rows[name].line} too", "one host's matrix")
        return
    while values and not values[-1]:
        values.pop()
    size = len(paste.columns)
    paste.rows[name] = _Row(number, values[:size], values[size:])


def _drop_cut_cell(paste: _Paste) -> None:
    """A paste may end inside a word: such a cell is dropped, and the other side of the pair completes it."""
    row = max(paste.rows.values(), key=lambda row: row.line, default=None)
    if row is None or not row.cells or row.rest or (len(row.cells) == len(paste.columns) and not paste.affinities):
        return
    cell = row.cells[-1]
    is_part = cell not in _WORDS and any(word.startswith(cell) for word in (*_WORDS, "NV"))
    if is_part or _NVLINKS.fullmatch(cell):
        row.cells.pop()


def _paths(paste: _Paste) -> dict[tuple[str, str], Path]:
    """The path of every pair that either side states; faults are added to the paste."""
    stated: dict[tuple[str, str], Path] = {}
    for name, row in paste.rows.items():
        for column, cell in zip(paste.columns, row.cells, strict=False):
            path = _path(paste, name, column, cell)
            if path is not None:
                stated[name, column] = path
    return dict(_agreed(paste, stated))


def _path(paste: _Paste, name: str, column: str, cell: str) -> Path | None:
    """One cell; None, and a fault where it is one, if it states no path."""
    where = f"line {paste.rows[name].line}: row {name}, column {column}"
    if name == column or cell == "X":
        if (name == column) != (cell == "X"):
            problem = f"is joined to itself by {cell!r}" if name == column else "is marked X, which is for itself only"
            paste.fault(where, problem, "X on the diagonal and nowhere else")
        return None
    if cell in _WORDS:
        return Path(_WORDS[cell])
    nvlinks = _NVLINKS.fullmatch(cell)
    if nvlinks and int(nvlinks[1]):
        return Path("NV", int(nvlinks[1]))
    if nvlinks:
        paste.fault(where, f"{cell}: no link, so no bandwidth", "NV# with # at least 1, or the PCIe path")
    elif cell in {"N/A", "DIS"}:
        paste.fault(where, "nothing joins the two", "a path: " + ", ".join(_KNOWN[1:]))
    elif cell:
        paste.fault(where, f"unknown word {cell[:20]!r}", nearest(cell[:20], _KNOWN) or f"known: {', '.join(_KNOWN)}")
    return None


def _agreed(paste: _Paste, stated: Mapping[tuple[str, str], Path]) -> Iterator[tuple[tuple[str, str], Path]]:
    for a, b in combinations(paste.columns, 2):
        there, back = stated.get((a, b)), stated.get((b, a))
        if there and back and there != back:
            where = f"line {paste.rows[a].line}: row {a}, column {b}"
            paste.fault(where, f"{there}, but row {b} says {back}", "the same path both ways")
        elif there or back:
            yield (a, b), there or back  # type: ignore[misc]  # one of them is there


def _gpus(paste: _Paste) -> Iterator[Gpu]:
    for name in paste.columns:
        if _GPU.fullmatch(name):
            row = paste.rows.get(name)
            affinities = dict(zip(paste.affinities, row.rest, strict=False)) if row else {}
            yield Gpu(
                name=name,
                numa=_known(affinities.get("NUMA Affinity", "")),
                cpus=_known(affinities.get("CPU Affinity", "")),
            )


def _known(cell: str) -> str:
    return "" if cell == "N/A" else cell


def _missing(paste: _Paste, paths: Mapping[tuple[str, str], Path], nics: Sequence[str]) -> Iterator[str]:
    absent = [name for name in paste.columns if name not in paste.rows]
    if absent:
        yield f"rows of {', '.join(absent)}: the paste ends before them"
    for name, row in paste.rows.items():
        if len(row.cells) < len(paste.columns):
            yield f"row {name} ends after {len(row.cells)} of {len(paste.columns)} columns"
    open_pairs = [f"{a}–{b}" for a, b in combinations(paste.columns, 2) if (a, b) not in paths]
    if open_pairs:
        shown = ", ".join(open_pairs[:6]) + (", …" if len(open_pairs) > 6 else "")
        yield f"paths of {len(open_pairs)} pairs that neither side tells: {shown}"
    if not nics:
        yield "network cards: the matrix lists none (nvidia-smi shows RDMA cards only, not EFA)"
    if "CPU Affinity" not in paste.affinities and "NUMA Affinity" not in paste.affinities:
        yield "affinity columns"
