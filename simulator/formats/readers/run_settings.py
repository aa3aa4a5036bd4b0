"""Columns of a table of runs that are keys of a plan (`reduce_dtype`), a stack (`stack.loss`) or a model (`model.norm`).

A key inside a table stands behind a further dot (`offload.optimizer`, `stack.attention.kernel`). Cells are words, numbers,
`true` and `false`; items of a list are separated by spaces. Columns of the fabric as the job's own machines gave it are read
here too: `inter_allreduce_gbps` is the key `fabric.inter.all_reduce`, in GB/s of nccl-tests' bus bandwidth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from simulator.base.records import Nested
from simulator.base.schema import Strict, model_at
from simulator.formats.readers.csv_table import Parser, integer_cell, number_cell, pattern_cell, text_cell
from simulator.spec.cluster.measured import COLLECTIVES
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

_NOUNS: Final[dict[str, type[BaseModel]]] = {"stack": Stack, "model": Model}
_INTEGER: Final = re.compile(r"-?[0-9]{1,15}")
_NUMBER: Final = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?(e-?[0-9]{1,3})?")
_WORDS: Final = {"true": True, "false": False}
MESSAGE_BYTES: Final = "fabric_message_bytes"
COPIES: Final = "fabric_gather_copies"
RANK_WAIT: Final = "fabric_call_rank_s"
_NAMED: Final = {
    f"{where}_{name}_gbps": f"fabric.{where}.{kind}"
    for where in ("inter", "intra")
    for name, kind in COLLECTIVES.items()
} | {
    MESSAGE_BYTES: "fabric.size_bytes",
    COPIES: "fabric.gather_copies",
    RANK_WAIT: "fabric.call_rank_s",
    "nccl_version": "stack.nccl.version",
}


def column_of(setting: str) -> str:
    """The column of a nested key, which `setting_of` reads back."""
    back = {key: column for column, key in _NAMED.items()}
    return back.get(setting, setting.removeprefix("plan."))


def setting_of(column: str) -> str | None:
    """The key behind its noun, by its flat name (`plan.reduce_dtype`), where the column is one; None where it is none."""
    if column in _NAMED:
        return _NAMED[column]
    first, _, rest = column.partition(".")
    noun, path = (first, rest) if first in _NOUNS and rest else ("plan", column)
    *tables, key = path.split(".")
    owner = model_at(_NOUNS.get(noun, Plan), tables)
    return f"{noun}.{_flat(noun, path)}" if owner is not None and key in _written(owner) else None


def _flat(noun: str, path: str) -> str:
    """The flat name of what a path of keys names: one spelling, by which a row is asked for it."""
    owner = _NOUNS.get(noun, Plan)
    names = owner.flat_names if issubclass(owner, Nested) else {}
    return next((name for name, place in names.items() if place == path), path)


def _written(owner: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """The keys that a file may have there."""
    return owner.written_fields() if issubclass(owner, Strict) else owner.model_fields


def setting_parser(setting: str) -> Parser:
    """The parser of its cells; None where blank."""
    if setting == _NAMED[RANK_WAIT]:
        return pattern_cell(
            r"0(\.[0-9]{1,9})?", float, "seconds from 0 to below 1", "as 0.000295; 0 if hosts do not wait"
        )
    if setting.startswith("fabric."):
        return integer_cell if setting in (_NAMED[MESSAGE_BYTES], _NAMED[COPIES]) else number_cell
    noun, *tables, key = setting.split(".")
    owner = model_at(_NOUNS.get(noun, Plan), tables)
    assert owner is not None, setting
    annotation = _written(owner)[key].annotation
    listed, is_text = "tuple" in str(annotation), annotation is str

    def parse(cell: str) -> object:
        if is_text:  # NCCL 2.18 is no number
            return text_cell(cell) or None
        words = [_value(word) for word in text_cell(cell).split()]
        if not words:
            return None
        return tuple(words) if listed else _value(cell)

    return parse


def _value(word: str) -> object:
    if word in _WORDS:
        return _WORDS[word]
    if _INTEGER.fullmatch(word):
        return int(word)
    return float(word) if _NUMBER.fullmatch(word) else word
