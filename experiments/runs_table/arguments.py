"""Rows whose notes hold Megatron-LM's own options ("args: {…}"): read by the reader of such options, with the columns.

The notes keep some of a run's options, so the columns are written as options beside them, and what megatron_tests.toml says of
the test that the row points to; what none of them says is the framework's default (dropout 0.1, an unfused loss, no overlap of
tensor parallelism).
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from runs_table.frameworks import FrameworkRule
from runs_table.rules import ends_as_layers
from simulator.formats.readers.plans.draft import Draft
from simulator.formats.readers.plans.megatron import read_megatron
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.rows import RunRow

Options = Mapping[str, Any]

_OPTIONS = re.compile(r"\bargs: (\{.*\})\s*$", re.DOTALL)
_TEST = re.compile(r"tests/functional_tests/test_cases/([^/]+/[^/]+)/")
_FFN = re.compile(r"\bffn=(\d+)\b")
# Megatron-LM, tools/common_pile_dataset/README.md: the files under this name are GPT-2's byte-pair encoding
_GPT2_FILES = "bpe/vocab.json"
_NO_TEXT = ("--tokenizer-type", "--vocab-size", "--padded-vocab-size")


def stated_options(row: RunRow) -> Options | None:
    """The options that a row's notes hold; None where they hold none."""
    found = _OPTIONS.search(row.notes)
    if found is None:
        return None
    try:
        options = json.loads(found[1])
    except ValueError:
        return None
    return options if isinstance(options, dict) and all(name.startswith("--") for name in options) else None


def draft_of(row: RunRow, options: Options, rule: FrameworkRule) -> Draft:
    """Plan, model and stack as the row's columns and options state them. Its faults are the row's."""
    line = {**_of_test(row), **dict(_columns(row, options, rule)), **options}
    return read_megatron(" ".join(_written(*item) for item in line.items()), f"line {row.line}")


@cache
def _tests() -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parent / "megatron_tests.toml").read_text("utf-8"))


def _of_test(row: RunRow) -> Options:
    """What the test says that the row's source points to; nothing where it points to none."""
    found = _TEST.match(row.source_location)
    if found is None:
        return {}
    told, test = _tests(), found[1]
    every = {name: value for name, value in told["every"].items() if name not in told["without"].get(test, ())}
    words = [option.split(" ", 1) for option, tests in told["options"].items() if test in tests]
    return every | {name: value[0] if value else True for name, *value in words}


def changed(stack: Stack, draft: Draft) -> Stack:
    """The stack with what the options say of it otherwise."""
    fields = {name: value for name, (value, _) in draft.stack_changes.items()}
    kernel = fields.pop("attention.kernel", stack.attention.kernel)
    attention = stack.attention.model_copy(update={"kernel": kernel})
    return stack.copy_with(**fields, attention=attention)


def unmodelled(draft: Draft) -> tuple[str, ...]:
    """Options whose effect on time or memory is in no prediction."""
    return tuple(dict.fromkeys(setting.name for setting in draft.named("not modelled", "unknown")))


def _written(name: str, value: object) -> str:
    """An option as a shell has it; a list stands in brackets in the tests' files."""
    text = str(value)
    words = text[1:-1].split() if text.startswith("[") and text.endswith("]") else [text]
    return name if value is True else " ".join([name, *map(shlex.quote, words)])


def _columns(row: RunRow, options: Options, rule: FrameworkRule) -> Iterator[tuple[str, object]]:
    """The columns in Megatron's words; True is a switch."""
    for name, number in _numbers(row).items():
        if number is not None:
            yield name, number
    for name, switch in _switches(row, options, rule).items():
        if switch:
            yield name, True
    if row.precision == "nvfp4":
        yield "--fp4-format", "e2m1"
    if row.precision == "fp8":
        yield "--fp8-format", "hybrid"
    if row.zero_or_fsdp == "fsdp_full":
        yield "--data-parallel-sharding-strategy", "optim_grads_params"
    if row.flash_attn == "n":
        yield "--attention-backend", "local"
    if row.act_ckpt == "full" and "--recompute-granularity" not in options:
        yield from (("--recompute-granularity", "full"), ("--recompute-method", "uniform"))
    yield from _vocabulary(row, options)
    yield from _widths(row)


def _numbers(row: RunRow) -> dict[str, int | None]:
    grouped = row.n_kv_heads if row.n_kv_heads != row.n_heads else None
    return {
        "--num-layers": row.n_layers,
        "--hidden-size": row.d_model,
        "--num-attention-heads": row.n_heads,
        "--num-query-groups": grouped,
        "--seq-length": row.seq_len,
        "--micro-batch-size": row.micro_batch,
        "--global-batch-size": row.global_batch,
        "--tensor-model-parallel-size": row.tp,
        "--pipeline-model-parallel-size": row.pp,
        "--context-parallel-size": row.cp,
        "--expert-model-parallel-size": row.ep,
        "--num-virtual-stages-per-pipeline-rank": row.vpp if (row.vpp or 1) > 1 and (row.pp or 1) > 1 else None,
        "--num-experts": row.n_experts,
        "--moe-router-topk": row.top_k,
    }


def _switches(row: RunRow, options: Options, rule: FrameworkRule) -> dict[str, bool]:
    ends = ends_as_layers(row, rule) and "--pipeline-model-parallel-layout" not in options
    selective = row.act_ckpt == "selective" and "--recompute-granularity" not in options
    return {
        "--group-query-attention": bool(row.n_kv_heads) and row.n_kv_heads != row.n_heads,
        "--sequence-parallel": row.seq_parallel == "y",
        "--swiglu": row.mlp_kind == "swiglu",
        "--squared-relu": row.mlp_kind == "squared_relu",
        "--use-distributed-optimizer": row.zero_or_fsdp == "zero1",
        "--use-megatron-fsdp": row.zero_or_fsdp == "fsdp_full",
        "--bf16": row.precision in ("bf16", "fp8", "fp8_mx", "nvfp4"),
        "--fp16": row.precision == "fp16",
        "--recompute-activations": selective,
        "--account-for-embedding-in-pipeline-split": bool(ends),
        "--account-for-loss-in-pipeline-split": bool(ends),
        "--multi-latent-attention": "--kv-lora-rank" in options,
    }


def _vocabulary(row: RunRow, options: Options) -> Iterator[tuple[str, object]]:
    """The column, else the tokenizer that the name of its file says."""
    if any(name in options for name in _NO_TEXT):
        return
    if row.vocab is not None:
        yield "--vocab-size", row.vocab
    elif str(options.get("--vocab-file", "")).endswith(_GPT2_FILES):
        yield "--tokenizer-type", "GPT2BPETokenizer"


def _widths(row: RunRow) -> Iterator[tuple[str, object]]:
    """The column d_ff is the width of one expert where there are experts; the notes say that of other layers."""
    mixture, noted = (row.n_experts or 1) > 1, _FFN.search(row.notes)
    if mixture:
        yield "--moe-ffn-hidden-size", row.d_ff
    if not mixture or noted:
        yield "--ffn-hidden-size", int(noted[1]) if mixture and noted else row.d_ff
