"""What a fault says of a value that does not suit its field: what was given, and what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from simulator.base.errors import InputError
from simulator.base.schema import Strict
from simulator.base.value_errors import Expected
from simulator.cli import main


class Inner(Strict):
    word: Literal["full", "none"] = "none"


class Written(Strict):
    name: Annotated[str, Expected("a preset's name")]
    count: int = Field(ge=1, default=1)
    share: float = Field(gt=0, le=1, default=0.5)
    on: bool = False
    inner: Inner = Inner()
    words: tuple[Literal["a", "b"], ...] = Field(default=(), strict=False)


@pytest.mark.parametrize(
    ("where", "value", "told"),
    [
        ("plan.reshard_after_forward", "maybe", 'must be true or false or a whole number; it is the text "maybe"'),
        ("plan.reshard_after_forward", "1.5", "must be true or false or a whole number; it is 1.5"),
        ("stack.fitted.elementwise_factor", "fast", 'must be a number or a table; it is the text "fast"'),
        ("stack.fitted.elementwise_factor", "-1", "must be greater than 0 or a table; it is -1"),
        ("run.jitter", "much", 'must be a number; it is the text "much"'),
        ("run.jitter", '{distribution="exponential", mean=-1}', "must be greater than 0; it is -1"),
    ],
)
def test_a_value_that_may_be_one_of_several_things_is_one_fault(
    where: str, value: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its key, without pydantic's names for the alternatives."""
    assert main(["goodput", "--steps", "5", "--set", f"{where}={value}"]) == 3
    (line,) = capsys.readouterr().err.splitlines()[1:]
    assert line.startswith(f"  --set {where}: ")
    assert line.endswith(told)
    table, _, key = where.rpartition(".")
    study, file = tmp_path / "study.toml", tmp_path / "stack.toml"
    stack = table.startswith("stack")
    written = f"{key} = {value}\n" if value[0] in "-{1" else f'{key} = "{value}"\n'
    file.write_text(f"[{table.removeprefix('stack.')}]\n{written}")
    text = 'model = "llama3-8b"\ncluster = "hgx-h100-8"\n'
    study.write_text(text + ('[plan]\nstack = "stack.toml"\n[run]\nsteps = 1\n' if stack else f"[{table}]\n{written}"))
    assert main(["goodput", str(study), "--steps", "5"]) == 3
    line = next(line for line in capsys.readouterr().err.splitlines() if key in line)
    assert f"{key}: {told}" in line or f"{key}.mean: {told}" in line


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"name": {"x": 1}}, "t: name: must be text in quotes; it is a table (a preset's name)"),
        ({}, "t: name: is missing (a preset's name)"),
        ({"count": "3"}, 't: count: must be a whole number; it is the text "3" (3 without quotes)'),
        ({"count": "three"}, 't: count: must be a whole number; it is the text "three"'),
        ({"count": 1.5}, "t: count: must be a whole number; it is 1.5"),
        ({"count": True}, "t: count: must be a whole number; it is true"),
        ({"count": 0}, "t: count: must be at least 1; it is 0"),
        ({"share": 0}, "t: share: must be greater than 0; it is 0"),
        ({"share": 2.5}, "t: share: must be at most 1; it is 2.5"),
        ({"share": [1]}, "t: share: must be a number; it is the list [1]"),
        ({"on": "yes"}, 't: on: must be true or false; it is the text "yes"'),
        ({"on": "true"}, 't: on: must be true or false; it is the text "true" (true without quotes)'),
        ({"inner": [1, 2]}, "t: inner: must be a table; it is the list [1, 2]"),
        ({"inner": {"word": "ful"}}, 't: inner.word: must be one of "full", "none"; it is "ful" (did you mean full?)'),
        ({"words": ["a", 3]}, 't: words[1]: must be one of "a", "b"; it is 3'),
        ({"count": "9" * 99}, f't: count: must be a whole number; it is the text "{"9" * 38}…'),
    ],
)
def test_the_fault_says_what_was_given_and_what_is_due(data: dict[str, object], told: str) -> None:
    with pytest.raises(InputError) as caught:
        Written.parse({"name": "n", **data} if data else {}, "t", InputError)
    assert [str(fault) for fault in caught.value.faults] == [told]


def test_a_study_of_wrong_types_is_told_in_one_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "study.toml"
    study.write_text('model = 3\nstack = "x"\n[cluster]\nname = "hgx-h100-8"\n[plan]\nzero = "3"\nrecompute = true\n')
    assert main(["predict", str(study), "--cuda-graphs", "foo"]) == 3
    told = capsys.readouterr().err.replace(f"{study}: ", "")
    assert told.startswith("shardwise: 6 faults")
    assert "model: must be text in quotes; it is 3 (a preset's name" in told
    assert "cluster: must be text in quotes; it is a table (a preset's name" in told
    assert 'plan.zero: must be a whole number; it is the text "3" (3 without quotes)' in told
    assert 'plan.recompute: must be one of "none", "full", "selective", "every_k"; it is true' in told
    assert "stack: unknown key (it belongs under [plan])" in told
    assert "--cuda-graphs: must be one of " in told
    assert "Input should" not in told
