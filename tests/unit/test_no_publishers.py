"""Product code does not know who published what: no condition names a publisher, a paper or a page.

Provenance is wanted everywhere else: in comments, docstrings, messages and the `sources` of data files.
"""

from __future__ import annotations

import ast
import csv
import gzip
import re
import tomllib
from collections.abc import Iterator
from functools import cache

from tests.sources import MODULES, ROOT, nodes, tree

STACKS = sorted((ROOT / "topologies" / "stacks").glob("*.toml"))
TABLES = [ROOT / "experiments" / "measured" / name for name in ("runs.csv.gz", "collectives.csv.gz")]
PAGES = re.compile(r"arxiv|\b\d{4}\.\d{4,5}\b|https?:|github\.com|huggingface\.co|readme", re.IGNORECASE)
# Owners whose name is a vendor's, a library's or a tool's too, and who are meant as such
ALSO_OTHERWISE = {"nvidia", "pytorch", "github", "https", "repository"}
PEOPLE = {"narayanan", "korthikanti", "selene", "vtrain", "simumax", "dgxc-benchmarking", "bigscience", "dgx06"}
ASKS = {"compile", "search", "match", "fullmatch", "findall", "finditer", "sub", "split", "startswith", "endswith"}


def _publishers() -> set[str]:
    """Owners of the sources that the carried tables name, and authors."""
    found = set(PEOPLE)
    for table in TABLES:
        with gzip.open(table, "rt", newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                source = re.sub(r"^(github:|https://github\.com/)", "", row["source"]).split("@")[0]
                found |= {source.casefold(), source.split("/")[0].split()[0].casefold()}
    return {name for name in found if len(name) > 3} - ALSO_OTHERWISE


def _strings(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def conditions(source: str) -> Iterator[str]:
    """Strings that code compares with, matches, searches for, or keeps in the tables of a module."""
    for node in nodes(source):
        if isinstance(node, ast.Compare | ast.MatchValue):
            yield from _strings(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKS:
            for argument in node.args:
                yield from _strings(argument)
    for statement in tree(source).body:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Tuple | ast.List | ast.Set | ast.Dict):
            yield from _strings(value)


def _named(text: str, publishers: set[str]) -> bool:
    return bool(PAGES.search(text) or _any_of(frozenset(publishers)).search(text.casefold()))


@cache
def _any_of(names: frozenset[str]) -> re.Pattern[str]:
    """One of the names as a word."""
    return re.compile(rf"(?<![a-z0-9])(?:{'|'.join(map(re.escape, sorted(names)))})(?![a-z0-9])")


def test_no_condition_names_a_publisher_a_paper_or_a_page() -> None:
    publishers = _publishers()
    found = {
        str(path.relative_to(ROOT)): named
        for path in MODULES
        if (named := [s for s in conditions(path.read_text(encoding="utf-8")) if _named(s, publishers)])
    }
    assert found == {}


def test_no_stack_is_matched_by_a_publisher() -> None:
    publishers = _publishers()
    for path in STACKS:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("describes", [])
        words = [*(name for entry in entries for name in entry.get("software", [])), *_versions(entries)]
        assert [word for word in words if _named(word, publishers)] == [], path.name


def _versions(entries: list[dict[str, list[str]]]) -> Iterator[str]:
    """Dates and releases; a month may look like a paper's number, a year and a page do not."""
    return (version for entry in entries for version in entry.get("versions", []) if not version[:4].isdigit())


def test_conditions_are_found_wherever_they_stand() -> None:
    code = """
\"\"\"By somebody: arXiv 2104.04473.\"\"\"
TABLE = ((r"vtrain", 1),)
PATTERN = re.compile(r"2205\\\\.05198")
def f(row):
    # mosaicml says so
    if row.source == "mosaicml/llm-foundry" or "InternLM" in row.notes:
        raise ValueError("as https://github.com/x says")
    match row.framework:
        case "selene":
            return row.notes.startswith("bigscience")
"""
    found = [string.replace("\\", "") for string in conditions(code)]
    named = {string for string in found if _named(string, {"vtrain", "mosaicml", "internlm", "selene", "bigscience"})}
    assert named == {"vtrain", "2205.05198", "mosaicml/llm-foundry", "InternLM", "selene", "bigscience"}
