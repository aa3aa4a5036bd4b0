"""Columns of tables of runs as people spell them (`topologies/names/columns.toml`), and what cells of other shapes mean.

`Tokens/s/GPU` is a result in tokens a second and GPU, `nodes` times `gpus_per_node` are GPUs, `zero_stage` 3 is `zero3`. A name
that leaves its unit open is none of ours; the table's answer says what would be right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

from simulator.base.errors import TableError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import read_toml
from simulator.formats.readers.csv_table import CellError, integer_cell, number_cell, one_of
from simulator.formats.readers.run_settings import setting_of

_OOM: Final = re.compile(r"oom|out[ _-]of[ _-]memory", re.IGNORECASE)
_MANY: Final = re.compile(r"([1-9][0-9]{0,5}) ?[xX×*] ?(.+)")  # 8xH100, 4 × A100
_MEASURED: Final = re.compile(r"^(?:throughput|average|avg|mean|median|measured|achieved|tgs)_(?=.)")
_stage: Final = one_of("0", "1", "2", "3", blank="")
_COUNTS: Final = ("micro_batch_size",)  # keys of a plan, but rules for blank cells ask for their columns
_STAGES: Final = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}


def own_names(header: Sequence[str], columns: Iterable[str]) -> list[str]:
    """Each column by our name, where it is one in another spelling and stands beside none of it; results keep their plain name.

    Behind a word that says how it was measured, too (`Avg step time (s)`), where no other column gives it.
    """
    known = {*columns, *parsers()}
    ours = {*known, *(name for name in header if "." in name or (setting_of(name) and name not in _COUNTS))}
    found = [name if name in ours else _own(name, known) for name in header]
    for at, name in enumerate(header):
        own = _own(_MEASURED.sub("", plain(name)), known)
        found[at] = own if found[at] == name not in ours and own in known and own not in found else found[at]
    return [name if own in header else own for name, own in zip(header, found, strict=True)]


def has_result(header: Iterable[str]) -> bool:
    """One of the columns, by our names, is of something measured: a result, or a figure of memory with its metric."""
    return any(name in names()["result"] or name in names()["memory"] or name == "mem_metric" for name in header)


def advice(column: str) -> str | None:
    """What would be right instead of a name that says too little."""
    return names()["open"].get(plain(column))


def gives(column: str) -> Collection[str]:
    """What such a column stands for once its name says enough: of a result, metric and value."""
    return ("metric", "value") if has_result(re.findall(r"\w+", advice(column) or "")) else ()


def plain(name: str) -> str:
    """Small letters, words joined by `_`: `Step time (ms)` is step_time_ms."""
    words = name.casefold().replace("%", " percent ").replace("#", " num ")
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"\s*/\s*", "_per_", words)).strip("_")


@cache
def names() -> Mapping[str, Mapping[str, Any]]:
    """The file: column, result, memory, open; words of cells."""
    return read_toml(TOPOLOGIES / "names" / "columns.toml", TableError)


def parsers() -> dict[str, Callable[[str], object]]:
    """Of the columns that are none of a row's: results, and what other columns follow from."""
    results = {
        name: partial(_result, percent=name.endswith("_percent"))
        for kind in ("result", "memory")
        for name in names()[kind]
    }
    counts = dict.fromkeys(("n_nodes", "accumulation"), integer_cell)
    return {
        **results,
        **counts,
        "zero_stage": lambda cell: _stage(re.sub(r"^(?:zero|stage|[ _-])+", "", cell.casefold())),
    }


def folded(values: dict[str, Any]) -> dict[str, Any]:
    """A record's cells with what its other columns say of `metric`, `value`, counts and sharding, where these are blank."""
    found = {name: values.pop(name) for name in parsers() if name in values}
    for kind, metric, amount in (("result", "metric", "value"), ("memory", "mem_metric", "mem_value")):
        stated = ((name, found[name]) for name in names()[kind] if found.get(name) not in (None, "oom"))
        name, number = next(stated, ("", None))
        if name and not values.get(metric):
            word, times = names()[kind][name]["metric"], names()[kind][name].get("times", 1)
            values |= {metric: word if kind == "result" else (word, "", ""), amount: number * times}
    if "oom" in found.values() and not values.get("mem_metric"):
        values["mem_metric"] = ("oom", "", "")
    values["zero_or_fsdp"] = values.get("zero_or_fsdp") or _STAGES.get(found.get("zero_stage", ""), "")
    return _counted(values, found.get("n_nodes"), found.get("accumulation"))


def _counted(values: dict[str, Any], nodes: int | None, accumulation: int | None) -> dict[str, Any]:
    """GPUs by nodes of so many, or as many as stand before the GPU's name; the global batch by micro-batches that are accumulated."""
    if many := _MANY.fullmatch(values.get("gpu") or ""):
        values["gpu"], stated = many[2], values.get("n_gpus")
        count = "gpus_per_node" if nodes or (stated and stated != int(many[1])) else "n_gpus"
        values[count] = values.get(count) or int(many[1])
    per_node, gpus = values.get("gpus_per_node"), values.get("n_gpus")
    if nodes and per_node and not gpus:
        values["n_gpus"] = gpus = nodes * per_node
    if nodes and gpus and not per_node and gpus % nodes == 0:
        values["gpus_per_node"] = gpus // nodes
    micro_batch, inner = values.get("micro_batch"), 1
    for degree in ("tp", "pp", "cp"):
        inner *= values.get(degree) or 1
    if accumulation and micro_batch and gpus and gpus % inner == 0 and not values.get("global_batch"):
        values["global_batch"] = micro_batch * accumulation * (gpus // inner)
    return values


def _own(name: str, known: Collection[str]) -> str:
    word = plain(name)
    return str(names()["column"].get(word, word if word in known else name))


def _result(cell: str, *, percent: bool) -> object:
    """A number; `oom` where the run ended for lack of memory. percent: a sign of per cent may stand behind it."""
    if _OOM.fullmatch(cell.strip()):
        return "oom"
    try:
        return number_cell(cell.removesuffix("%").strip() if percent else cell)
    except CellError as exc:
        raise CellError(exc.problem, "a decimal number without separators, `OOM`, or blank if unknown") from None
