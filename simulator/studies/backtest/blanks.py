"""Blank cells of a row, filled from its other columns, from its software's documented defaults, or with every possible value.

A row is predicted in the first of those ways that fits the device: nobody recomputes or shards more than a run needs.
Its interval spans all that fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from math import prod
from typing import Any, Final

from simulator.spec.plan.traits import implementation_names, traits_of
from simulator.spec.software.described import Described, Nature, named_in
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.measured import device_of
from simulator.studies.backtest.models import with_sizes
from simulator.studies.backtest.notes import shows_fused, worded
from simulator.studies.backtest.rows import RunRow
from simulator.studies.backtest.unstated import SPLIT, VOCABULARIES, adapted, adapters_of, routed

_OPEN: Final = ("micro_batch", "zero_or_fsdp", "act_ckpt", "vocab")
_UNSAID: Final[Mapping[str, tuple[str, ...]]] = {"zero_or_fsdp": ("ddp", "fsdp_full"), "act_ckpt": ("none", "full")}
_LATER_MICRO_BATCHES: Final = (2, 4)
_COLUMNS: Final = {f.name for f in fields(RunRow)}


def described(row: RunRow) -> tuple[str, Described]:
    """The stack of a row, by its column or by its framework's name, and that stack file's description of the framework."""
    if not row.stack:
        row = worded(row)
        nature = _nature(row)
        return Stack.described_as(row.framework, row.compile, nature, tiled=_tiled(row, nature))
    entries = Stack.load(row.stack).describes
    return row.stack, next(iter((*named_in(row.framework, entries), *entries)), Described())


def _nature(row: RunRow) -> Nature:
    """The kernels of software that no stack file names, guessed from the row.

    Products in fp8 or fp4 are Transformer Engine's, but under FSDP torchao's, which are made for torch.compile. Models split over
    tensors, stages, tokens or experts are split in Megatron's way, but where parameters are sharded over replicas too, as torch's
    own are; so are those that the row gives data parallelism of Megatron's own layers.
    """
    narrow, fsdp = row.precision.startswith(("fp8", "nvfp4")), row.zero_or_fsdp.startswith(("fsdp", "hsdp"))
    stated = row.of("plan").get("data_parallel")
    if shows_fused(row) or (stated in implementation_names() and traits_of(stated).core_layers):
        return "fused"
    if narrow:
        return "compiled" if fsdp else "fused"
    split = prod(degree or 1 for degree in (row.tp, row.pp, row.cp, row.ep)) > 1
    return "fused" if split and not fsdp and row.zero_or_fsdp not in ("zero2", "zero3") else "eager"


def _tiled(row: RunRow, nature: Nature) -> bool:
    """Whether attention is tiled: as stated, or, where hand-written layers run, by what such layers could do at their time.

    Kernels of Transformer Engine's kind begin with Ampere; and models were split in fp16 on GPUs with bf16 before there were any.
    """
    if row.flash_attn or nature != "fused" or not (row.gpu or row.machine):
        return row.flash_attn != "n"
    return row.precision != "fp16" and device_of(row).half == "bf16"


def filled_rows(row: RunRow) -> tuple[RunRow, ...]:
    """The row with its blanks filled, one row per combination: less sharded and less recomputed first. Never empty.

    What has one answer, a documented default, is filled in all of them.
    """
    row = worded(row)
    software = described(row)[1]
    defaults = software.defaults
    row = routed(_dealt(_cut(counted(with_sizes(_with_defaults(row, defaults))), software)))
    vocabularies = (row.vocab,) if row.vocab or row.model else VOCABULARIES
    choices = product(
        adapted(row), _micro_batches(row), _shardings(row, defaults), _recomputations(row, defaults), vocabularies
    )
    return tuple(
        _with_batch(replace(one, micro_batch=size, zero_or_fsdp=word, act_ckpt=again, vocab=vocab), defaults)
        for one, size, word, again, vocab in choices
    )


def filled_words(filled: RunRow, variants: Sequence[RunRow]) -> str:
    """The values of a filled row in the columns that differ between variants: `zero_or_fsdp ddp, act_ckpt full`."""
    open_columns = [name for name in _OPEN if len({getattr(each, name) for each in variants}) > 1]
    words = [f"{name} {getattr(filled, name)}" for name in open_columns]
    adapters = {each: adapters_of(each) for each in variants}
    return ", ".join([*words, adapters[filled]] if len({*adapters.values()}) > 1 else words)


def states_recompute(row: RunRow) -> bool:
    """Whether the table states what was recomputed."""
    return bool(row.act_ckpt) or "recompute" in row.of("plan")


def _with_defaults(row: RunRow, defaults: Mapping[str, Any]) -> RunRow:
    """Fill blank columns and plan keys with the software's documented defaults, where there is only one."""
    single = {name: value for name, value in defaults.items() if not isinstance(value, list)}
    columns = {
        name: value
        for name, value in single.items()
        if name in _COLUMNS and name not in (*_OPEN[1:], "global_batch") and getattr(row, name) in (None, "")
    }
    stated = dict(row.settings)
    keys = {(name if "." in name else f"plan.{name}"): value for name, value in single.items() if name not in _COLUMNS}
    return replace(row, **columns, settings=tuple({**keys, **stated}.items()))


def _cut(row: RunRow, software: Described) -> RunRow:
    """Split a pipeline's batch by the software's default number of micro-batches, if the row states only a rank's batch."""
    if software.pipeline == "stated" or (row.pp or 1) == 1 or row.num_micro_batches or not row.global_batch:
        return row
    share, rest = divmod(row.global_batch, _ranks(row))
    parts = share if software.pipeline == "sequences" else row.pp or 1
    if rest or share % parts or (row.micro_batch or share) != share:
        return row
    return replace(row, micro_batch=share // parts)


def _dealt(row: RunRow) -> RunRow:
    """If a pipeline's chunks cannot share the layers evenly, the last one, which has the head, gets fewer, as recipes do."""
    chunks, layers, stated = (row.pp or 1) * (row.vpp or 1), row.n_layers or 0, row.of("plan").keys()
    most = -(-layers // chunks)
    last = layers - most * (chunks - 1)
    if row.pp in (None, 1) or layers % chunks == 0 or last < 1 or not SPLIT.isdisjoint(stated):
        return row
    dealt = (*(most,) * (chunks - 1), last)
    return replace(row, settings=(*row.settings, ("plan.stage_layers", dealt)))


def _ranks(row: RunRow) -> int:
    """Ranks that read different sequences."""
    return max(1, (row.n_gpus or 1) // ((row.tp or 1) * (row.pp or 1) * (row.cp or 1)))


def _micro_batches(row: RunRow) -> Iterator[int | None]:
    """Possible micro-batch sizes: a rank's whole share first (no accumulation); in a pipeline, or if that is large, from 1 on."""
    if row.micro_batch or not row.global_batch:
        yield row.micro_batch
        return
    share = -(-row.global_batch // _ranks(row))
    if row.num_micro_batches:
        yield -(-share // row.num_micro_batches)
        return
    undivided = (row.pp or 1) == 1 and share <= max(_LATER_MICRO_BATCHES)
    sizes = [size for size in (1, *_LATER_MICRO_BATCHES) if share % size == 0 and size <= share]
    yield from dict.fromkeys([share, 1] if undivided else sizes)


def _shardings(row: RunRow, defaults: Mapping[str, Any]) -> Sequence[str]:
    found = _answers("zero_or_fsdp", row, defaults)
    return found[:1] if _ranks(row) * (row.cp or 1) == 1 else found  # ranks of cp share shards, too


def _recomputations(row: RunRow, defaults: Mapping[str, Any]) -> Sequence[str]:
    return ("",) if "recompute" in row.of("plan") else _answers("act_ckpt", row, defaults)


def _answers(column: str, row: RunRow, defaults: Mapping[str, Any]) -> Sequence[str]:
    """Possible values of a blank column."""
    if stated := getattr(row, column):
        return (stated,)
    default = defaults.get(column, _UNSAID[column])
    return (default,) if isinstance(default, str) else default


def _with_batch(row: RunRow, defaults: Mapping[str, Any]) -> RunRow:
    """The software's default global batch if none is stated; else one without accumulation, unless a pipeline needs it."""
    default = defaults.get("global_batch")
    if row.global_batch or not row.micro_batch or ((row.pp or 1) > 1 and default is None):
        return row
    least = row.micro_batch * _ranks(row)
    return replace(row, global_batch=-(-(default or 1) // least) * least)


def counted(row: RunRow) -> RunRow:
    """The row with blank counts and precision that follow from its other columns."""
    return _with_precision(_with_degrees(_with_gpu(row)))


def _with_gpu(row: RunRow) -> RunRow:
    """The GPU of the machine that it names."""
    return replace(row, gpu=device_of(row).name) if row.machine and not row.gpu else row


def _with_degrees(row: RunRow) -> RunRow:
    """The number of GPUs from the degrees; `dp` without the axes that its framework counts inside it.

    Some count cp's ranks among dp's, DeepSpeed and others ep's beside them, some all GPUs of one stage.
    """
    inner, cp, ep = (row.tp or 1) * (row.pp or 1), row.cp or 1, row.ep or 1
    if row.n_gpus is None:
        return replace(row, n_gpus=inner * cp * row.dp if row.dp else None)
    if row.dp is None or row.n_gpus == inner * cp * row.dp or row.n_gpus % (inner * cp):
        return row
    counted_otherwise = {inner * row.dp, inner * row.dp * ep, inner * row.dp * ep * cp}
    return replace(row, dp=None) if row.n_gpus in counted_otherwise else row


def _with_precision(row: RunRow) -> RunRow:
    """A blank precision is mixed 16-bit, bf16 or fp16 by the row's GPU."""
    return replace(row, precision=row.precision or (device_of(row).half if row.gpu else "bf16"))
