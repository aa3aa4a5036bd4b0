"""The picture of a step's memory: what it is drawn from, and that it is drawn."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.units import format_bytes
from simulator.cli import main
from simulator.formats.drawing import drawn
from simulator.formats.writers.step_plots import peak_words, write_memory_plot
from simulator.memory import History, device_history
from simulator.memory.live_bytes import live_bytes
from simulator.predict import Prediction, predict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

MODEL = Model(name="small", num_layers=3, d_model=256, num_heads=4, d_ff=704, vocab_size=1024)
PLAN = Plan(dp_shard=8, seq_len=256, num_micro_batches=2)
NODE = Cluster.load("hgx-h100-8")


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return predict(MODEL, PLAN, NODE)


@pytest.fixture(scope="module")
def history() -> History:
    return device_history(MODEL, PLAN, Stack.load(PLAN.stack), NODE.device)


@pytest.mark.parametrize("points", [1, 7, 100_000])
def test_categories_sum_to_what_is_allocated_and_the_peak_is_kept(
    prediction: Prediction, history: History, points: int
) -> None:
    shown = live_bytes(history, points)
    samples = prediction.memory_trace.samples
    assert shown.num_moments == len(samples)
    assert len(shown.at) <= points
    totals = [sum(sizes) for sizes in zip(*shown.by_category.values(), strict=True)]
    assert totals == [samples[moment].allocated_bytes for moment in shown.at]
    assert max(totals) == prediction.memory.peak_allocated_bytes


def test_owners_at_the_peak_are_those_of_the_prediction(prediction: Prediction, history: History) -> None:
    shown = live_bytes(history, 100_000)
    at = shown.at.index(prediction.memory_trace.peak_index)
    owners = {name: sizes[at] for name, sizes in shown.by_category.items() if sizes[at]}
    assert owners == prediction.memory.by_category


def test_phases_follow_each_other(history: History) -> None:
    phases = [phase for _, phase in live_bytes(history, 10).phases]
    micro_batches = [(name, number) for number in (0, 1) for name in ("forward", "backward")]
    assert phases == [*micro_batches, ("optimizer", 1)]


def test_the_picture_names_peak_owners_and_capacity(prediction: Prediction, history: History, tmp_path: Path) -> None:
    write_memory_plot(tmp_path / "a.svg", prediction, history)
    svg = (tmp_path / "a.svg").read_text()
    comments = re.findall(r"<!-- (.*?) -->", svg, re.DOTALL)
    assert any(text.startswith(f"capacity {format_bytes(prediction.memory.capacity_bytes)}") for text in comments)
    said = peak_words(prediction).splitlines()
    assert prediction.memory.peak_moment in said[0]
    assert all(any(line in text for text in comments) for line in said)
    assert {"reserved", "outside torch", "activations"} <= set(comments)


def test_equal_predictions_make_equal_bytes(prediction: Prediction, history: History, tmp_path: Path) -> None:
    for name, start in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        one, other = tmp_path / name, tmp_path / f"again-{name}"
        write_memory_plot(one, prediction, history)
        write_memory_plot(other, prediction, history)
        assert one.read_bytes() == other.read_bytes()
        assert one.read_bytes().startswith(start)


@pytest.mark.parametrize("name", ["a.gif", "a"])
def test_other_formats_are_refused_before_anything_is_drawn(
    prediction: Prediction, history: History, tmp_path: Path, name: str
) -> None:
    with pytest.raises(InputError, match=r"\.png, \.svg or \.pdf"):
        write_memory_plot(tmp_path / name, prediction, history)


def test_a_folder_that_is_not_there_is_a_fault(prediction: Prediction, history: History, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        write_memory_plot(tmp_path / "absent" / "a.svg", prediction, history)


def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, snapshot = tmp_path / "m.png", tmp_path / "m.pickle"
    arguments = ["predict", "--model", "llama3.2-1b", "--plain"]
    assert main([*arguments, "--memory", str(picture), "--snapshot", str(snapshot)]) == ExitCode.OK
    assert picture.stat().st_size > 10_000
    assert snapshot.stat().st_size > 10_000
    assert str(picture) in capsys.readouterr().err


def test_names_of_any_length_leave_room_for_the_axes(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with drawn(tmp_path / "x.svg", "--plot", (9, 5)) as figure:
            axes = figure.subplots()
            axes.plot([0, 1], [0, 1], label="9" * 4000)
            axes.legend()
    assert "9" * 119 + "…" in (tmp_path / "x.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [r"$\frac{$", "\0\t\ud800\x1b[31m", "节点", "a--b<&>", "9" * 4000])
def test_a_name_is_drawn_as_it_is_written(name: str, tmp_path: Path) -> None:
    """No formula, nothing that no font has, nothing too long for a tick; the file can be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with drawn(tmp_path / "x.svg", "--plot", (9, 5)) as figure:
            axes = figure.subplots()
            axes.set(title=name, xscale="log")
            axes.plot([1, 9], [0, 1], label=name)
            axes.legend()
            axes.set_yticks([0, 1], [name, "b"], rotation=60)
    drawing = ET.parse(tmp_path / "x.svg")  # noqa: S314  our own
    assert next(drawing.iter()).tag.endswith("svg")
