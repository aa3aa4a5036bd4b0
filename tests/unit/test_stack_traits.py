"""Traits of a stack: `Stack.blocks` is read in one place, and what it means has names that others ask for."""

import ast
import csv
import dataclasses
import gzip
import re
from typing import Final, get_args

import pytest

from simulator.base.presets import TOPOLOGIES
from simulator.spec.software.stack import Stack
from simulator.spec.software.traits import TRAITS, Blocks, StackTraits
from tests.sources import MODULES, ROOT, nodes


def _blocks_asked(source: str) -> list[int]:
    """Lines that read the `blocks` of a stack, or compare something's `blocks` with one of its words."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and node.attr == "blocks":
            owner = re.split(r"\W+", ast.unparse(node.value))
            if any(part.endswith("stack") for part in owner):
                found.append(node.lineno)
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            texts = {c.value for part in parts for c in ast.walk(part) if isinstance(c, ast.Constant)}
            if texts & set(get_args(Blocks)) and any(ast.unparse(part).endswith("blocks") for part in parts):
                found.append(node.lineno)
    return found


def test_nobody_compares_the_blocks_of_a_stack() -> None:
    """Ask for a trait (`simulator.spec.software.traits`) instead."""
    asked = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in MODULES
        if "spec/software/" not in file.as_posix()
        for line in _blocks_asked(file.read_text(encoding="utf-8"))
    ]
    assert asked == []


@pytest.mark.parametrize(
    "line",
    [
        'fused = s.stack.blocks == "fused"',
        'if "compiled" != self._stack.blocks: pass',
        "blocks = stack.blocks",
        "blocks = run.stack.kernels.blocks",
        'eager = setting.blocks in ("eager", "compiled")',
        'match stack.blocks:\n    case "eager": pass',
    ],
)
def test_such_a_comparison_is_found(line: str) -> None:
    assert _blocks_asked(line)


@pytest.mark.parametrize("line", ["blocks = lowering.blocks", "for block in allocator.blocks(): pass"])
def test_other_blocks_are_not_meant(line: str) -> None:
    assert not _blocks_asked(line)


def test_every_trait_is_asked_for() -> None:
    """A trait without a reader says nothing."""
    texts = [file.read_text(encoding="utf-8") for file in MODULES if "spec/software/" not in file.as_posix()]
    asked = {name for text in texts for name in re.findall(r"stack\.traits\.(\w+)", text)}
    names = {field.name for field in dataclasses.fields(StackTraits)}
    assert names <= asked
    assert asked <= names


def test_a_stack_has_the_traits_of_its_blocks() -> None:
    assert set(TRAITS) == set(get_args(Blocks))
    stack = Stack.load("torch-2.6-eager")
    assert stack.traits is TRAITS["eager"]
    assert stack.copy_with(blocks="fused").traits is TRAITS["fused"]


def test_torch_splits_what_does_not_split_itself() -> None:
    for traits in TRAITS.values():
        assert traits.dtensor != traits.linears_communicate
        assert not (traits.runs_operators and traits.compiles_blocks)


_OF_KIN: Final = {  # the same software in another release or compiled otherwise is among the measured runs
    "deepspeed-0.14",
    "torch-2.4-compiled",
    "torchtitan-2025-eager",
    "transformers-2023",
}


def test_software_that_was_read_and_never_measured_says_so_in_its_sigma() -> None:
    """The default is of stacks whose steps were measured; no open row is of these."""
    measured = set[str]()
    for table in ("runs-plain", "runs-2-plain"):
        with gzip.open(ROOT / "experiments" / "measured" / f"{table}.csv.gz", "rt", encoding="utf-8") as rows:
            measured |= {row["stack"] for row in csv.DictReader(rows)}
    names = sorted({path.stem for path in (TOPOLOGIES / "stacks").glob("*.toml")} - measured - _OF_KIN)
    stacks = [one for one in map(Stack.load, names) if one.engine is None]
    read = [one for one in stacks if any(entry.software and not entry.family for entry in one.describes)]
    assert len(read) > 8
    assert [one.name for one in read if one.fitted.sigma < 0.10 or "sigma" not in one.sources] == []
