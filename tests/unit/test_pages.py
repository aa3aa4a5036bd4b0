"""`--html`: the page holds what --json prints, stands alone, and no name in it can do anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.cli import main
from simulator.formats.answer_keys import beside, key_of, meaning_of
from simulator.formats.html import MOST_BYTES, _cut, _lists, _size, page
from simulator.formats.html.figures import found
from simulator.formats.html.timeline import MOST_SPANS, critical_path, timeline_of
from simulator.work.trace import Span, Timeline
from tests.pages import COMMANDS, SMALL, Page, Values, inside, made

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028<!--'\"&{{7*7}}"


@pytest.fixture(params=COMMANDS)
def one(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> Page:
    return made(str(request.param), tmp_path_factory, capsys)


def test_a_page_is_its_commands_answer_and_stands_alone(one: Page) -> None:
    assert one.answer == one.printed
    values = Values(one.text)
    assert values.found, "a page shows numbers of its answer"
    for path, value in values.found:
        there = found(one.printed, path)
        assert value == ("" if there is None else str(there)), path
    assert len(one.text.encode()) <= MOST_BYTES
    assert not values.tags & {"link", "img", "iframe", "object", "embed", "base", "form"}
    before_data = one.text.partition('<script type="application/json"')[0]
    assert "http-equiv" in before_data
    assert "http" not in before_data.replace("http-equiv", "")
    assert "default-src 'none'" in before_data.replace("&#39;", "'")


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value below, with its path."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from leaves(value, f"{path}/{key}".strip("/"))
    else:
        yield path, data


def test_every_key_is_described_and_every_number_opens_its_description(one: Page) -> None:
    for path, _ in leaves(one.printed):
        meaning = meaning_of(one.kind, key_of(path))
        assert meaning is not None and meaning.own, f"{path}: add it to simulator/formats/answer_keys.toml"  # noqa: PT018
    told = inside(one.text, "meanings")
    numbers = [path for path, value in Values(one.text).found if value.replace(".", "", 1).isdecimal()]
    assert numbers
    for path in numbers:
        assert told[key_of(path)]["means"], path
        for name in told[key_of(path)].get("inputs", ()):
            at = beside(path, name)
            assert meaning_of(one.kind, key_of(at)), f"{path} is made of {at}, which nothing describes"


def test_a_page_is_the_same_bytes_twice(one: Page) -> None:
    assert page(one.kind, one.answer, one.drawing) == page(one.kind, one.answer, one.drawing) == one.text


def test_hostile_words_stay_words(one: Page) -> None:
    text = page(one.kind, hostile(one.answer), hostile(one.drawing))
    assert "img" not in Values(text).tags
    assert text.count("<script") == page(one.kind, one.answer, one.drawing).count("<script")
    assert inside(text, "answer") == hostile(one.answer)


def hostile(data: Any) -> Any:
    """The same data with words of an attacker behind each text."""
    if isinstance(data, str):
        return data + HOSTILE
    if isinstance(data, dict):
        return {key: hostile(value) for key, value in data.items()}
    return [hostile(value) for value in data] if isinstance(data, list) else data


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "--model", "nobody", "--html", str(tmp_path / "no" / "x.html")]) == 3
    assert "--html" in capsys.readouterr().err
    full = Path("/dev/full")
    if full.exists():
        assert main(["predict", *SMALL, "--html", str(full)]) == 3
        assert "--html /dev/full: cannot be written" in capsys.readouterr().err


def test_a_long_list_is_cut_and_the_page_says_so() -> None:
    rows = [{"what": f"input {i}", "kind": "given", "detail": "x" * 400} for i in range(5000)]
    text = page("predict", {**_answer(), "sources": rows}, {"timeline": timeline_of(Timeline(spans=(), step_s=1.0))})
    assert len(text.encode()) <= MOST_BYTES
    shown = len(inside(text, "answer")["sources"])
    assert 0 < shown < 5000
    assert f"the first {shown:,} of 5,000 sources" in text


def test_no_answer_makes_a_page_of_more_than_a_megabyte(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a comparison each row is shown with more words than it has in JSON."""
    answer = dict(made("compare", tmp_path_factory, capsys).answer)
    answer["subjects"] = answer["subjects"] * 400
    text = page("compare", answer)
    assert MOST_BYTES / 4 < len(text.encode()) <= MOST_BYTES
    assert 0 < len(inside(text, "answer")["subjects"]) < len(answer["subjects"])


def _answer() -> dict[str, Any]:
    memory = {"peak_moment": "", "by_category": {}, "used_bytes": 1, "capacity_bytes": 2, "peak_allocated_bytes": 1}
    return {
        "model": "m", "cluster": "c", "num_devices": 1, "verdict": "fits", "cause": "", "suggestion": "", "remedies": [],
        "step_s": 1.0, "low_s": 0.5, "high_s": 2.0, "uncertainty": {}, "tokens_per_step": 0, "model_flop_per_step": 0, "hfu": 0.1,
        "breakdown_s": {"gemm": 1.0}, "communication": {}, "memory": memory, "kinds": [], "extrapolated": [], "sources": [],
    }  # fmt: skip


def _span(number: int, start_s: float, end_s: float, **more: Any) -> Span:
    told = {
        "program": "rank",
        "stream": "compute",
        "label": f"op {number}",
        "category": "gemm",
        "nominal_s": 1.0,
    } | more
    return Span(id=number, start_s=start_s, end_s=end_s, **told)


def test_the_critical_path_goes_on_at_the_rank_that_came_last() -> None:
    late = {"program": "other", "cause": 0}
    meets = {"stream": "nccl", "category": "all_reduce", "joined_s": 5.0}
    spans = (
        _span(0, 0.0, 1.0),
        _span(1, 1.0, 6.0, cause=0, **meets),
        _span(2, 6.0, 7.0, cause=1),
        _span(0, 0.0, 5.0, program="other"),
        _span(1, 5.0, 6.0, **meets, **late),
    )
    path = critical_path(Timeline(spans=spans, step_s=7.0))
    assert path == {("rank", 2), ("rank", 1), ("other", 1), ("other", 0)}


def test_a_timeline_too_long_for_a_page_is_drawn_together_and_covers_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("simulator.formats.html.timeline.MOST_SPANS", MOST_SPANS // 20)
    count = 3 * MOST_SPANS // 20
    spans = tuple(_span(i, float(i), i + 0.75) for i in range(count))
    told = timeline_of(Timeline(spans=spans, step_s=float(count)))
    flat = told["programs"][0]["rows"][0]["bars"]
    bars, ops, end, at = 0, 0, 0, 0
    while at < len(flat):
        end += flat[at] + flat[at + 1]
        bars, ops, at = bars + 1, ops + flat[at + 5], at + 7 + flat[at + 6]
    assert MOST_SPANS / 40 < bars <= MOST_SPANS / 20
    assert ops == told["num_ops"] == count
    assert end * told["tick_s"] == pytest.approx(count - 0.25)
    assert told["together_s"] > 1
    assert len(json.dumps(told, separators=(",", ":"))) < MOST_BYTES / 40


def test_a_slice_of_a_gpu_has_a_page_without_a_node(tmp_path: Path) -> None:
    page = tmp_path / "slice.html"
    asked = ["predict", "--model", "gpt2", "--gpus", "1xh100:3g.40gb", "--seq-len", "512", "--html", str(page)]
    assert main(asked) == 0
    assert "gpt2" in page.read_text(encoding="utf-8")


def test_lists_of_a_list_of_one_are_cut_too() -> None:
    """Of a machine of 1,024 GPUs on one switch the pairs are 24 MB, in the only island of its list."""
    answer: dict[str, Any] = {
        "islands": [{"pairs": ["x" * 40] * 50_000}],
        "roads": ["y" * 40] * 9_000,
        "gpus": [1, 2],
    }
    lists, total = sorted(_lists(answer), key=lambda one: -one[0]), _size(answer)
    for most in (300_000, 99_000):  # measured once, and cut again where a page is still too large
        cut = _cut(lists, total, most)
        assert len(json.dumps(answer, separators=(",", ":"))) < 1.02 * most
    assert (len(answer["islands"][0]["pairs"]), answer["gpus"]) == (1, [1, 2])
    assert (
        cut
        == f"This page holds the first 1 of 50,000 pairs and the first {len(answer['roads']):,} of 9,000 roads; --json has all."
    )
