"""Every command, snippet and output of README and docs, as `tests/documented.py` says: it runs, and prints what is shown."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator.formats.study import read_study
from simulator.formats.study.serving import read_serving_study
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.prices import Prices
from simulator.spec.software.stack import Stack
from tests.documented import EXAMPLES, MINUTES, PAGES, REASONS, ROOT, blocks, counts, known, played
from tests.documented import RUN as RUN_KINDS

RUN = [page for page in PAGES if any(block.runs() for block in blocks(page))]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_a_page_runs_and_shows_what_is_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if page.stem in ("capture", "validate"):
        request.getfixturevalue("warm_captures")
    monkeypatch.delenv("COLUMNS", raising=False)
    assert played(page, tmp_path / "checkout").faults == []


def test_marks_are_known_and_say_why() -> None:
    marks = [f"{page.stem}: {block.mark}" for page in PAGES for block in blocks(page) if block.mark]
    assert [mark for mark in marks if not known(mark.partition(": ")[2])] == []


def test_few_blocks_are_not_run_and_none_without_a_reason() -> None:
    here, left = counts()
    never = [block for _, block in left if block.kind in RUN_KINDS and block.mark != f"not run: {MINUTES}"]
    assert len(never) < sum(here[kind] for kind in RUN_KINDS) / 3
    assert {block.mark.removeprefix("not run: ") for _, block in left} <= REASONS.keys()


def test_a_block_has_a_kind_that_is_looked_at() -> None:
    kinds = {"sh", "python", "pycon", "text", "toml"}
    found = [f"{page.stem}:{block.line}: {block.kind}" for page in PAGES for block in blocks(page)]
    assert [one for one in found if one.rpartition(": ")[2] not in kinds] == []


def test_no_command_stands_in_a_block_that_is_not_run() -> None:
    other = [block for page in PAGES for block in blocks(page) if block.kind != "sh"]
    quoted = [block.body for block in other if re.search(r"^shardwise ", block.body, re.MULTILINE)]
    assert [body for body in quoted if "[" not in body] == []  # a synopsis has brackets


def test_what_stands_in_a_file_is_the_file() -> None:
    for page in PAGES:
        for block in blocks(page):
            first = re.match(r"# ([\w-]+\.toml)\n", block.body)
            if block.mark.startswith("of "):
                lines = iter((ROOT / block.mark.removeprefix("of ")).read_text(encoding="utf-8").splitlines())
                assert [line for line in block.body.splitlines() if line not in lines] == [], page.name  # in order
            elif first:
                file = tomllib.loads((EXAMPLES / first[1]).read_text(encoding="utf-8"))
                shown = tomllib.loads(block.body)
                assert shown == {key: file.get(key) for key in shown}, f"{page.name}: {first[1]}"
            if block.kind == "toml":
                tomllib.loads(block.body)


WHOLE: dict[str, Callable[[Path], object]] = {
    "plan-file": lambda file: read_study(file, {}, {}, ()),
    "inference-file": lambda file: read_serving_study(file, {}, {}, ()),
    "cluster-file": Cluster.load,
    "model-file": Model.load,
    "prices-file": Prices.load,
    "stack-file": Stack.load,
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_first_file_of_a_reference_is_read(name: str, tmp_path: Path) -> None:
    shown = next(block for block in blocks(ROOT / "docs" / "reference" / f"{name}.md") if block.kind == "toml")
    file = tmp_path / "shown.toml"
    file.write_text(shown.body, encoding="utf-8")
    assert WHOLE[name](file) is not None


def test_every_example_is_used() -> None:
    named = " ".join(page.read_text(encoding="utf-8") for page in PAGES)
    files = [file.name for file in EXAMPLES.iterdir() if file.name != "hdr-node.toml"]
    assert [name for name in files if name not in named] == []


def test_another_output_is_a_fault_and_the_nearest_line_is_offered(tmp_path: Path) -> None:
    page = ROOT / "docs" / "nothing.md"
    text = '```python\nprint("step 1.25 s")\n```\n\n```text\nstep 1.01 s\n```\n'
    path = tmp_path / page.name
    path.write_text(text)

    class Here(type(path)):  # type: ignore[misc]
        def relative_to(self, *_: object) -> Path:
            return Path(page.name)

    made = played(Here(path), tmp_path / "checkout")
    assert made.faults == ["nothing.md:5: shows 'step 1.01 s', and now it is 'step 1.25 s'"]
    assert made.rewritten() == text.replace("1.01 s\n", "1.25 s\n")
