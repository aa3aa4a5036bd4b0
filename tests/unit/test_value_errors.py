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
        ("plan.reshard_after_forward", "maybe", '"maybe" is text, and true or false or a whole number is due'),
        ("plan.reshard_after_forward", "1.5", "is 1.5, and true or false or a whole number is due"),
        ("stack.fitted.elementwise_factor", "fast", '"fast" is text, and a number or a table is due'),
        ("stack.fitted.elementwise_factor", "-1", "is -1; it must be greater than 0"),
        ("run.jitter", "much", '"much" is text, and a number is due'),
        ("run.jitter", '{distribution="exponential", mean=-1}', "is -1; it must be greater than 0"),
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
        ({"name": {"x": 1}}, "t: name: is a table, and text in quotes is due (a preset's name)"),
        ({}, "t: name: is missing (a preset's name)"),
        ({"count": "3"}, 't: count: "3" is text, and a whole number is due (3 without quotes)'),
        ({"count": "three"}, 't: count: "three" is text, and a whole number is due'),
        ({"count": 1.5}, "t: count: is 1.5, and a whole number is due"),
        ({"count": True}, "t: count: is true, and a whole number is due"),
        ({"count": 0}, "t: count: is 0; it must be at least 1"),
        ({"share": 0}, "t: share: is 0; it must be greater than 0"),
        ({"share": 2.5}, "t: share: is 2.5; it must be at most 1"),
        ({"share": [1]}, "t: share: is the list [1], and a number is due"),
        ({"on": "yes"}, 't: on: "yes" is text, and true or false is due'),
        ({"on": "true"}, 't: on: "true" is text, and true or false is due (true without quotes)'),
        ({"inner": [1, 2]}, "t: inner: is the list [1, 2], and a table is due"),
        ({"inner": {"word": "ful"}}, 't: inner.word: "ful" is none of "full", "none" (did you mean full?)'),
        ({"words": ["a", 3]}, 't: words[1]: 3 is none of "a", "b"'),
        ({"count": "9" * 99}, f't: count: "{"9" * 38}… is text, and a whole number is due'),
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
    assert "model: is 3, and text in quotes is due (a preset's name" in told
    assert "cluster: is a table, and text in quotes is due (a preset's name" in told
    assert 'plan.zero: "3" is text, and a whole number is due (3 without quotes)' in told
    assert 'plan.recompute: true is none of "none", "full", "selective", "every_k"' in told
    assert "stack: unknown key (it belongs under [plan])" in told
    assert '--cuda-graphs: "foo" is none of' in told
    assert "Input should" not in told
