"""Pages in a real browser: they open without a request, can be operated, show the JSON's numbers, and axe-core finds nothing serious."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.base.units import format_bytes
from simulator.formats.html import page
from simulator.formats.html.figures import found
from tests.browser import CHROMIUM, Browser
from tests.pages import COMMANDS, Page, made
from tests.unit.test_pages import hostile

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="pages are tried in Chromium, and it is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> Any:
    def open_page(kind: str, width: int = 1600, *, dark: bool = False) -> Page:
        one = made(kind, tmp_path_factory, capsys)
        browser.size(width, 900, dark=dark)
        browser.open(one.file.as_uri())
        return one

    return open_page


def _quiet(browser: Browser, file: Path) -> None:
    assert browser.requests == [file.as_uri()]
    assert not browser.problems


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_page_opens_can_be_used_and_fits_every_screen(kind: str, opened: Any, browser: Browser) -> None:
    one = opened(kind)
    _quiet(browser, one.file)
    assert browser.ask("JSON.parse(document.getElementById('answer').textContent)") == one.printed
    assert (
        browser.ask("document.querySelectorAll('main svg').length + document.querySelectorAll('main table').length") > 0
    )
    assert browser.ask("document.documentElement.dataset.theme") == "light"
    _number_opens(browser, one)
    opened(kind, 390, dark=True)
    assert browser.ask("document.documentElement.dataset.theme") == "dark"
    assert browser.ask("document.documentElement.scrollWidth") <= 390
    _quiet(browser, one.file)
    assert browser.judged() == []


def _number_opens(browser: Browser, one: Page) -> None:
    """By keyboard: the first number of the answer tells its key and its value in --json, and a figure its formula."""
    number = "[...document.querySelectorAll('main data[data-path][role=button]')].find((one) => one.checkVisibility())"
    path = browser.ask(f"(() => {{ const one = {number}; one.focus(); return one.dataset.path }})()")
    assert browser.ask("document.activeElement.dataset.path") == path
    browser.key("Enter", "\r")
    told = browser.ask("document.querySelector('dialog[open] p.source:last-of-type').textContent")
    key, _, value = told.partition(" = ")
    assert (key, float(value)) == (path.replace("/", "."), found(one.printed, path))
    browser.ask("document.querySelector('dialog[open] .tools button').click()")
    card = browser.ask(
        "document.querySelector('main details.card > summary')?.focus() ?? !!document.querySelector('.card')"
    )
    if card:
        browser.key("Enter", "\r")
        assert browser.ask("document.querySelector('details.card').open && !!document.querySelector('.card .why p')")


def test_memory_is_told_under_the_pointer_and_by_keys(opened: Any, browser: Browser) -> None:
    memory = opened("predict").drawing["memory"]
    browser.ask(
        "document.querySelector('[data-draw=memory] svg').scrollIntoView({block: 'center', behavior: 'instant'})"
    )
    browser.ask("document.querySelector('[data-draw=memory] svg').focus()")
    browser.key("p")  # the peak
    said = browser.ask("document.querySelector('[data-draw=memory] .said').textContent")
    peak = max(range(len(memory["at"])), key=lambda at: memory["allocated"][at])
    assert said.startswith(memory["labels"][memory["label"][peak]])
    x, y = browser.ask(
        "(() => { const b = document.querySelector('[data-draw=memory] svg').getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2] })()"
    )
    browser.point(x, y)
    assert "reserved" in browser.ask("document.getElementById('tip').innerText")


def test_the_timeline_zooms_searches_and_shows_the_critical_path(opened: Any, browser: Browser) -> None:
    drawing = opened("predict").drawing
    plot, tools = (
        "document.querySelector('[data-draw=timeline] svg')",
        "document.querySelector('[data-draw=timeline] .tools')",
    )
    browser.ask("document.getElementById('timeline').scrollIntoView({behavior: 'instant'})")
    browser.wait(plot)
    whole = browser.ask(f"{plot}.getAttribute('aria-label')")
    browser.ask(f"{plot}.focus()")
    browser.key("+")
    assert browser.ask(f"{plot}.getAttribute('aria-label')") != whole
    browser.key("0")
    assert browser.ask(f"{plot}.getAttribute('aria-label')") == whole
    browser.ask(
        f"(() => {{ const box = {tools}.querySelector('input'); box.value = 'OPTIMIZER'; box.dispatchEvent(new Event('input')); box.focus() }})()"
    )
    assert " found, " in browser.ask(f"{tools}.querySelector('output').textContent")
    browser.key("Enter", "\r")
    assert browser.ask(f"{tools}.querySelector('output').textContent").startswith("1 of ")
    assert browser.ask(f"{plot}.querySelectorAll('.hit').length") == 1
    browser.ask(f"[...{tools}.querySelectorAll('button')].find((one) => one.textContent === 'Critical path').click()")
    assert browser.ask(f"{tools}.querySelector('[aria-pressed=true]').textContent") == "Critical path"
    assert len(drawing["timeline"]["programs"]) == 2


def test_a_cell_of_the_matrix_is_told_and_marks_its_gpus(opened: Any, browser: Browser) -> None:
    gpus = opened("predict").drawing["traffic"]["gpus"]
    browser.ask("document.querySelector('[data-draw=matrix] svg').focus()")
    browser.key("ArrowRight")
    said = browser.ask("document.querySelector('[data-draw=matrix] .said').textContent")
    assert said == f"GPU 0 to GPU 1: {format_bytes(gpus[0][1])} in a step"
    marked = "[...document.querySelectorAll('[data-draw=node] .hit')].map((one) => one.dataset.part)"
    assert browser.ask(marked) == ["gpu0", "gpu1"]


def test_a_table_sorts_and_a_figure_opens_its_formula(opened: Any, browser: Browser) -> None:
    answer = opened("predict").printed
    browser.ask("document.querySelectorAll('#time table th button')[1].click()")
    first = browser.ask("Number(document.querySelector('#time tbody tr td data').value)")
    assert first == min(seconds for seconds in answer["breakdown_s"].values() if seconds)
    browser.ask("document.querySelector('#verdict .card summary').focus()")
    browser.key("Enter", "\r")
    assert browser.ask("document.querySelector('#verdict .card').open")
    assert float(browser.ask("document.querySelector('#verdict .card .why data').value")) == answer["lower_s"]


def test_a_number_of_a_table_opens_what_it_is_made_of(opened: Any, browser: Browser) -> None:
    answer = opened("search").printed
    browser.ask("document.querySelector('#plans tbody data[role=button]').focus()")
    browser.key("ArrowRight")
    browser.key("Enter", "\r")
    box = "document.querySelector('dialog[open]')"
    assert browser.ask(f"{box}.querySelector('h2').textContent") == "step: 1"
    assert browser.ask(f"{box}.querySelector('code').textContent") == "plans.0.step_s"
    inputs = browser.ask(f"[...{box}.querySelectorAll('dd data')].map((one) => [one.dataset.path, Number(one.value)])")
    assert inputs == [[f"plans/0/{name}", answer["plans"][0][name]] for name in ("low_s", "high_s")]
    browser.ask(f"{box}.querySelector('dd data').click()")
    assert browser.ask(f"{box}.querySelector('code').textContent") == "plans.0.low_s"
    browser.ask(f"{box}.querySelector('.tools button').click()")
    assert browser.ask(box) is None


def test_the_theme_is_switched(opened: Any, browser: Browser) -> None:
    opened("predict")
    before = browser.ask("getComputedStyle(document.body).backgroundColor")
    browser.ask("document.getElementById('theme').click()")
    assert browser.ask("document.documentElement.dataset.theme") == "dark"
    assert browser.ask("getComputedStyle(document.body).backgroundColor") != before
    browser.ask("localStorage.clear()")


def test_words_of_an_attacker_do_nothing(opened: Any, browser: Browser, tmp_path: Path) -> None:
    one = opened("predict")
    file = tmp_path / "hostile.html"
    file.write_text(page("predict", hostile(one.answer), hostile(one.drawing)), encoding="utf-8")
    browser.open(file.as_uri())
    _quiet(browser, file)
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert "<img src=x onerror=alert(1)>" in browser.ask("document.querySelector('h1').textContent")


def test_names_of_an_attacker_do_nothing_in_what_if(opened: Any, browser: Browser, tmp_path: Path) -> None:
    one, file = opened("explore"), tmp_path / "hostile.html"
    answer = one.answer | {"command": hostile(one.answer["command"]), "reasons": hostile(one.answer["reasons"])}
    answer["axes"] = [axis | {"values": hostile(axis["values"])} for axis in one.answer["axes"]]
    file.write_text(page("explore", answer), encoding="utf-8")
    browser.open(file.as_uri())
    _quiet(browser, file)
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert "'plan.tp=" in browser.ask("document.querySelector('#chosen pre').textContent"), "quoted for a shell"


def _chosen(browser: Browser) -> dict[str, float]:
    told = "[...document.querySelectorAll('#chosen data')].map((one) => [one.dataset.figure, Number(one.value)])"
    return dict(browser.ask(told))


def test_what_if_is_chosen_pinned_and_kept_in_the_address(opened: Any, browser: Browser) -> None:
    one = opened("explore")
    columns = one.printed["columns"]

    def point(tp: str, nodes: str, size: str) -> int:
        wanted = {"plan.tp": tp, "nodes": nodes, "plan.micro_batch_size": size}
        places = {axis["key"]: axis["values"].index(wanted[axis["key"]]) for axis in one.printed["axes"]}
        return next(
            i for i in range(len(columns["verdict"])) if all(one.printed["at"][k][i] == v for k, v in places.items())
        )

    runs = [i for i, verdict in enumerate(columns["verdict"]) if verdict == "fits"]
    best = max(runs, key=lambda i: columns["tokens_per_s"][i])
    assert _chosen(browser)["step_s"] == columns["step_s"][best]
    browser.ask("""(() => { const slider = document.querySelector('input[aria-label^="plan.micro"]'); slider.value = 3; slider.dispatchEvent(new Event('input'));
      const select = document.querySelector('#axis-0'); select.value = '1'; select.dispatchEvent(new Event('change'));
      const nodes = document.querySelector('#axis-1'); nodes.value = '0'; nodes.dispatchEvent(new Event('change')) })()""")  # fmt: skip
    at = point("2", "1", "4")
    assert {name: columns[name][at] for name in _chosen(browser)} == _chosen(browser)
    command = browser.ask("document.querySelector('#chosen pre').textContent")
    assert command.endswith("--set plan.tp=2 --nodes 1 --set plan.micro_batch_size=4")
    browser.ask("[...document.querySelectorAll('#chosen button')].find((one) => one.textContent === 'Pin').click()")
    assert "micro_batch_size 4" in browser.ask("document.querySelector('#pinned tbody').textContent")
    address = browser.ask("location.href")
    browser.send("Page.navigate", url="about:blank")
    browser.send("Page.navigate", url=address)
    browser.wait("document.documentElement?.dataset.ready === 'yes'")
    assert {name: columns[name][at] for name in _chosen(browser)} == _chosen(browser)
    assert "micro_batch_size 4" in browser.ask("document.querySelector('#pinned tbody').textContent")
    browser.ask("[...document.querySelectorAll('button')].find((one) => one.textContent === 'Clear filters').click()")
    assert browser.ask("document.querySelector('.said').textContent").startswith(f"{len(columns['verdict'])} of ")
    assert browser.judged() == []


def test_the_front_is_walked_by_keys(opened: Any, browser: Browser) -> None:
    opened("explore")
    browser.ask("document.querySelector('[data-draw=whatif] svg').focus()")
    before = browser.ask("document.querySelector('#chosen h2').textContent")
    browser.key("ArrowLeft")
    assert browser.ask("document.activeElement.tagName").lower() == "svg"
    browser.key("Enter", "\r")
    pinned = browser.ask("document.querySelector('#pinned tbody').textContent")
    assert browser.ask("document.querySelector('#chosen h2').textContent") in pinned
    assert before
