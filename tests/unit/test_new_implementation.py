"""The example of CONTRIBUTING: an implementation in one file is predicted, in time and in memory, with no other change."""

import re
from math import prod
from pathlib import Path
from typing import Any

import pytest

from simulator import Cluster, Model, Plan, Prediction, predict
from simulator.base.registry import IMPLEMENTATIONS
from simulator.cli import main
from simulator.spec.software.stack import Stack
from simulator.work.script import Implementation, register, step_script
from simulator.work.script.instructions import Pass, Unshard
from simulator.work.script.order import Chunk

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
CLUSTER = Cluster.load("hgx-h100-8")
MODEL = Model.load("llama3.2-1b")


@pytest.fixture
def in_pairs(monkeypatch: pytest.MonkeyPatch) -> Implementation:
    IMPLEMENTATIONS.names()  # those that ship are registered first
    monkeypatch.setattr(IMPLEMENTATIONS, "_values", dict(IMPLEMENTATIONS._values))
    block = re.search(r"```python\n(\"\"\"FSDP2 that gathers two.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    found: dict[str, Any] = {}
    exec(compile(block[1], str(PAGE), "exec"), found)  # noqa: S102  the page is ours
    return register(found["FSDP2_IN_PAIRS"])


def predicted(name: str) -> Prediction:
    return predict(MODEL, Plan(dp_shard=8, seq_len=2048, data_parallel=name), CLUSTER)


def gathers(prediction: Prediction, direction: str) -> list[tuple[float, str]]:
    spans = prediction.timeline.spans if prediction.timeline is not None else ()
    named = [(float(span.start_s), span.label) for span in spans if span.label.startswith("all-gather layer")]
    return sorted(one for one in named if one[1].endswith("backward") == (direction == "backward"))


def test_a_new_implementation_is_one_file(in_pairs: Implementation) -> None:
    usual, pairs = predicted("fsdp2"), predicted(in_pairs.traits.name)
    assert pairs.step_s == pytest.approx(usual.step_s, rel=0.2)
    assert pairs.step_s != usual.step_s
    # one more unit is gathered while another runs: the buffer of a layer in 16 bits
    layer = sum(numel for _, numel in _layer_numels()) * 2
    more = pairs.memory.by_category["unsharded_parameters"] + pairs.memory.by_category.get("all_gather", 0)
    less = usual.memory.by_category["unsharded_parameters"] + usual.memory.by_category.get("all_gather", 0)
    assert 0 <= more - less <= 2 * layer


def _layer_numels() -> list[tuple[str, int]]:
    return [(name, prod(shape)) for name, shape in MODEL.parameter_shapes("layer")]


def test_its_script_gathers_two_units_where_the_usual_one_gathers_one(in_pairs: Implementation) -> None:
    stack, chunk = Stack.load("torch-2.6-eager"), Chunk(num_layers=4)  # six units with both ends of the model
    forward, backward, *_ = step_script(Plan(dp_shard=8, data_parallel=in_pairs.traits.name), stack, [chunk], 1)
    for one, units in (
        (forward, [[0, 1], [], [2, 3], [], [4, 5], []]),
        (backward, [[5, 4], [], [3, 2], [], [1, 0], []]),
    ):
        assert isinstance(one, Pass)
        sent = [step.gathers for group in one.units for step in group if isinstance(step, Unshard)]
        assert [[unit for unit, _ in each] for each in sent] == units


def test_each_layer_is_gathered_once_in_the_usual_order(in_pairs: Implementation) -> None:
    for direction in ("forward", "backward"):
        alone = gathers(predicted("fsdp2"), direction)
        paired = gathers(predicted(in_pairs.traits.name), direction)
        assert [label for _, label in paired] == [label for _, label in alone]  # each once, in the same order


def test_the_command_line_knows_it(in_pairs: Implementation, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", "--model", "llama3.2-1b", "--seq-len", "2048", "--data-parallel", in_pairs.traits.name]
    assert main(command) in (0, 4)
    assert "step" in capsys.readouterr().out


def test_without_its_registration_it_is_none_of_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--data-parallel", "fsdp2_in_pairs"]) == 3
    assert 'must be one of "ddp", "fsdp1", "fsdp2"' in capsys.readouterr().err
