"""What neither a row nor its framework's documents say: every way to fill it that a run could have had.

A row is predicted in the first of those ways that fits the device: nobody recomputes or shards more than a run needs.
Its interval spans all that fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from runs_table.frameworks import FrameworkRule
from simulator.studies.backtest.rows import RunRow

_OPEN: Final = ("micro_batch", "zero_or_fsdp", "act_ckpt")
_REMAT: Final = re.compile(r"remat[_ ]policy[=: ]+['\"]?(\w+)")
_INTERLEAVED: Final = re.compile(r"(?<!non-)(?<!non )\binterleaved", re.IGNORECASE)
_RECOMPUTE: Final = ("none", "full")
_LATER_MICRO_BATCHES: Final = (2, 4)


def choices(row: RunRow, rule: FrameworkRule) -> tuple[RunRow, ...]:
    """The row with its blanks filled, once a way: less sharded and less recomputed first. Never empty.

    What has one answer, a documented default, is filled in all of them.
    """
    row = replace(row, micro_batch=row.micro_batch or rule.micro_batch)
    if rule.layer_a_stage and row.vpp is None and row.n_layers and (row.pp or 1) > 1:
        row = replace(row, vpp=-(-row.n_layers // (row.pp or 1)))
    row = _in_parts(row, rule)
    options = product(_micro_batches(row), _shardings(row, rule), _recomputations(row, rule))
    return tuple(
        _with_batch(replace(row, micro_batch=size, zero_or_fsdp=word, act_ckpt=again), rule.global_batch)
        for size, word, again in options
    )


def described(filled: RunRow, variants: Sequence[RunRow]) -> str:
    """How a way fills the columns that the ways differ in: `zero_or_fsdp ddp, act_ckpt full`."""
    open_columns = [name for name in _OPEN if len({getattr(each, name) for each in variants}) > 1]
    return ", ".join(f"{name} {getattr(filled, name)}" for name in open_columns)


def _ranks(row: RunRow) -> int:
    """Ranks that read different sequences."""
    return max(1, (row.n_gpus or 1) // ((row.tp or 1) * (row.pp or 1) * (row.cp or 1)))


def _in_parts(row: RunRow, rule: FrameworkRule) -> RunRow:
    """Stages and micro-batches of a pipeline whose row states the whole batch of a rank, and what its notes call interleaved."""
    if (row.pp or 1) == 1:
        return row
    if row.vpp is None and _INTERLEAVED.search(row.notes):
        row = replace(row, vpp=2)  # the least, and torchtitan's own
    size = row.micro_batch or 1
    if rule.parts is None or row.global_batch != size * _ranks(row):
        return row
    parts = row.pp if rule.parts == "stages" and size % (row.pp or 1) == 0 else size
    return replace(row, micro_batch=size // (parts or 1))


def _micro_batches(row: RunRow) -> Iterator[int | None]:
    """A rank's whole share first, as who accumulates nothing; in a pipeline, or where that is more than a few, from 1 on."""
    if row.micro_batch or not row.global_batch:
        yield row.micro_batch
        return
    share = -(-row.global_batch // _ranks(row))
    undivided = (row.pp or 1) == 1 and share <= max(_LATER_MICRO_BATCHES)
    sizes = [size for size in (1, *_LATER_MICRO_BATCHES) if share % size == 0 and size <= share]
    yield from dict.fromkeys([share, 1] if undivided else sizes)


def _shardings(row: RunRow, rule: FrameworkRule) -> Iterator[str]:
    if row.zero_or_fsdp or rule.sharding or _ranks(row) == 1:
        yield row.zero_or_fsdp or (rule.sharding or "ddp")
    else:
        yield from ("ddp", "zero3" if rule.replicated == "deepspeed" else "fsdp_full")


def _recomputations(row: RunRow, rule: FrameworkRule) -> Iterator[str]:
    if rule.recompute == "products" and row.act_ckpt in ("", "selective"):
        yield from _remat(row)
    elif row.act_ckpt or rule.recompute:
        yield row.act_ckpt
    else:
        yield from _RECOMPUTE


def _remat(row: RunRow) -> tuple[str, ...]:
    """MaxText's remat policies by the notes: `minimal…` keeps products, what keeps less is nearer to keeping nothing.

    Where they name none, whichever fits: its configurations of small models keep products, base.yml nothing.
    """
    policy = _REMAT.search(row.notes)
    if policy is None:
        return "selective", "full"
    return ("selective",) if policy[1].startswith("minimal") else ("full",)


def _with_batch(row: RunRow, default: int | None) -> RunRow:
    """The framework's global batch where none is stated; else one without accumulation, where no pipeline needs it."""
    if row.global_batch or not row.micro_batch or ((row.pp or 1) > 1 and default is None):
        return row
    least = row.micro_batch * _ranks(row)
    return replace(row, global_batch=-(-(default or 1) // least) * least)
