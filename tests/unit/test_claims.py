"""Claims: each file is whole, verdicts follow from figures, and the page says what the commands answer."""

from __future__ import annotations

import json
from pathlib import Path

import claims.__main__ as program  # experiments/
import pytest
from claims.arithmetic import Number, evaluate, exact, names_in
from claims.claim import STUDIES, Claim, load, load_all
from claims.commands import asked, kept, read, values
from claims.page import page, pictures, section
from claims.verdicts import Settled, Verdict, settle

CLAIMS = {claim.id: claim for claim in load_all()}
ANSWERS = json.loads(program.ANSWERS.read_text(encoding="utf-8"))
SETTLED = {name: settle(claim, values(claim, ANSWERS)) for name, claim in CLAIMS.items()}
# Asked again in each run of the tests: a tenth of a second each
QUICK = ("b10-small-all-reduce", "c2-a100-memory", "d2-adam-bytes", "d6-ring-and-tree", "d8-fsdp-states")
TOOL = "every claim again: python -m experiments.claims"


def made(**changes: object) -> Claim:
    """A claim of one command and one figure."""
    figure = {"name": "held", "formula": "held_bytes", "unit": "GB", "says": "held by a GPU", "about": 10}
    data: dict[str, object] = {
        "id": "x",
        "document": "A",
        "title": "A GPU holds 10 GB",
        "claim": "A GPU holds ten gigabytes.",
        "figure": "10 GB",
        "holds_where": "It is always so.",
        "by_hand": "Ten of them.",
        "reading": "As it stands.",
        "commands": {"run": "predict"},
        "values": {"held_bytes": "run: memory.used_bytes"},
        "figures": [figure],
    }
    return Claim.model_validate(data | changes, strict=False)


def settled(low: float, middle: float, high: float, **changes: object) -> Settled:
    return settle(made(**changes), {"held_bytes": Number(middle * 1e9, low * 1e9, high * 1e9)})


def test_there_are_fifty_claims_of_four_documents() -> None:
    assert len(CLAIMS) == 50
    assert {claim.document for claim in CLAIMS.values()} == {"A", "B", "C", "D"}
    assert all(name.startswith(claim.document.lower()) for name, claim in CLAIMS.items())


def test_the_page_and_its_pictures_follow_from_files_and_answers() -> None:
    folder = program.DOCS / "claims"
    assert (program.DOCS / "claims.md").read_text(encoding="utf-8") == page(list(SETTLED.values())), TOOL
    drawn = pictures(SETTLED.values())
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")} == drawn, TOOL


def test_answers_are_those_of_the_claims_commands() -> None:
    """A command or a path that changed has no answer yet; one that no claim asks for has no business there."""
    assert list(ANSWERS) == list(asked(CLAIMS.values())), TOOL


@pytest.mark.parametrize("name", QUICK)
def test_a_claim_that_is_asked_again_says_what_the_page_says(name: str) -> None:
    claim = CLAIMS[name]
    answers = {command: kept(command, paths) for command, paths in asked([claim]).items()}
    now = section(settle(claim, values(claim, answers)))
    assert now in (program.DOCS / "claims.md").read_text(encoding="utf-8"), TOOL


def test_every_number_has_a_source_or_is_an_answer() -> None:
    """Formulas hold no numbers but 0, 1 and 2; constants say where they come from; limits are the claim's."""
    for claim in CLAIMS.values():
        for figure in claim.figures:
            assert names_in(figure.formula), f"{claim.id}: {figure.name} is made of nothing"
        assert all(len(constant.source) >= 10 for constant in claim.constants.values())
    with pytest.raises(ValueError, match=r"0\.9: only"):
        names_in("0.9 * held")
    with pytest.raises(ValueError, match="source"):
        made(constants={"five": {"value": 5, "source": ""}})


@pytest.mark.parametrize(
    ("low", "middle", "high", "verdict"),
    [
        (9.1, 10, 10.9, Verdict.HOLDS),  # all of it within a tenth of 10
        (10.5, 10.8, 11.5, Verdict.OPEN),  # reaches beyond 11
        (11.5, 12, 13, Verdict.FAILS),
        (10, 10, 10, Verdict.HOLDS),
        (8.9, 8.9, 8.9, Verdict.FAILS),  # counted, a hair outside
    ],
)
def test_a_verdict_follows_from_where_the_interval_lies(
    low: float, middle: float, high: float, verdict: Verdict
) -> None:
    assert settled(low, middle, high).verdict is verdict


def test_a_condition_is_looked_at_where_the_claim_itself_is_not_met() -> None:
    main = {"name": "held", "formula": "held_bytes", "unit": "GB", "says": "held by a GPU", "about": 10}
    half = {**main, "name": "half", "formula": "held_bytes / 2", "if": "two GPUs share it"}
    beside = {**half, "name": "beside", "formula": "held_bytes", "at_most": 30, "about": None}
    found = settled(20, 20, 20, figures=[main, half, beside])
    assert (found.verdict, found.words) == (Verdict.HOLDS_IF, "holds if two GPUs share it")
    assert settled(10, 10, 10, figures=[main, half, beside]).verdict is Verdict.HOLDS
    strict = {**beside, "at_most": 15}
    assert (
        settled(20, 20, 20, figures=[main, half, strict]).verdict is Verdict.FAILS
    )  # one of its two figures is not met


def test_what_nothing_decides_says_why() -> None:
    plain = {"name": "held", "formula": "held_bytes", "unit": "GB", "says": "held by a GPU"}
    found = settled(1, 1, 1, figures=[plain], undecidable="no limit is stated")
    assert (found.verdict, found.why) == (Verdict.OPEN, "no limit is stated")
    with pytest.raises(ValueError, match="undecidable"):
        made(figures=[plain])
    with pytest.raises(ValueError, match="undecidable"):
        made(undecidable="but a figure decides it")


def test_a_figure_far_from_the_arithmetic_by_hand_is_refused() -> None:
    constants = {"ten": {"value": 10e9, "source": "arithmetic by hand"}}
    figure = {
        "name": "held",
        "formula": "held_bytes",
        "unit": "GB",
        "says": "held by a GPU",
        "about": 10,
        "hand": "ten",
    }
    assert settled(10.4, 10.4, 10.4, figures=[figure], constants=constants).verdict is Verdict.HOLDS
    with pytest.raises(ValueError, match=r"held is 10\.6 GB, by hand 10 GB"):
        settled(10.6, 10.6, 10.6, figures=[figure], constants=constants)


def test_an_interval_has_the_ends_of_every_combination() -> None:
    known = {"step": Number(4, 2, 8), "calls": Number(2, 1, 4), "two": exact(2)}
    assert evaluate("calls / step", known) == Number(0.5, 0.125, 2)
    assert evaluate("two * step - calls", known) == Number(6, 0, 15)
    assert evaluate("step - step", known) == Number(0, 0, 0)  # one name has one value


def test_a_wrong_file_says_all_that_is_wrong(tmp_path: Path) -> None:
    good = (STUDIES / "c2-a100-memory.toml").read_text(encoding="utf-8")
    wrong = good.replace('document = "C"', 'document = "Z"').replace('unit = "GiB"', 'unit = "furlongs"')
    (tmp_path / "c2.toml").write_text(wrong, encoding="utf-8")
    with pytest.raises(ValueError, match="furlongs"):
        load(tmp_path / "c2.toml")
    wrong = good.replace('document = "C"', 'document = "Z"').replace('formula = "capacity"', 'formula = "bytes"', 1)
    (tmp_path / "c2.toml").write_text(wrong, encoding="utf-8")
    with pytest.raises(ValueError, match=r"(?s)document 'Z'.*no value 'bytes'"):
        load(tmp_path / "c2.toml")


def test_paths_read_what_they_name() -> None:
    found = {
        "memory": {"used": 3, "fits": True},
        "rows": [{"name": "a", "s": 1.5}, {"name": "b", "s": 2}],
        "none": None,
    }
    assert read(found, "memory.used") == 3
    assert read(found, "memory.fits") == 1
    assert read(found, "rows[1].s") == 2
    assert read(found, "rows[a].s") == 1.5
    assert read(found, "memory.*") == 4
    assert read(found, "memory.absent.deeper") is None
    assert read(found, "rows[c].s") is None
