"""Whatever is misspelled, its fault names what was meant: presets, options, commands, keys of files, `--set`s. One fault, one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from simulator.base.exit_codes import ExitCode
from simulator.base.value_errors import close_names
from simulator.cli import VERBS, main, shardwise
from simulator.spec.calibration import calibration_names
from simulator.spec.cluster.cluster import cluster_names
from simulator.spec.model.files import preset_names
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

PRESETS = {
    "--model": preset_names(),
    "--cluster": cluster_names(),
    "--stack": Stack.names(),
    "--calibration": calibration_names(),
}
GOOD = 'model = "llama3-8b"\ncluster = "hgx-h100-8"\n[plan]\nseq_len = 8192\n[run]\nsteps = 10\n'


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The faults of a command that is refused."""
    assert main(arguments) == 3
    return [line.strip() for line in capsys.readouterr().err.splitlines()[1:]]


def misspelled(name: str) -> str:
    """The name with its last two letters exchanged, or the last doubled."""
    swapped = name[:-2] + name[-1] + name[-2]
    return swapped if swapped != name else name + name[-1]


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize(
    ("written", "known", "near"),
    [
        ("h100", cluster_names(), {"hgx-h100-8", "dgx-h100-8", "pcie-h100-8"}),
        ("lama", preset_names(), {"llama-7b"}),
        ("Llama-3-8B", preset_names(), {"llama3-8b"}),
        ("fsdp", Stack.names(), {"fms-fsdp-2024"}),
        ("predct", VERBS, {"predict"}),
        ("batch-size", ["micro-batch-size", "seq-len"], {"micro-batch-size"}),
        ("nothing like it", cluster_names(), set()),
    ],
)
def test_names_are_near_by_letters_or_by_a_word(written: str, known: list[str], near: set[str]) -> None:
    found = close_names(written, known)
    assert near <= set(found)
    assert bool(found) == bool(near)


@pytest.mark.parametrize("flag", PRESETS)
def test_every_preset_is_named_where_it_is_misspelled(flag: str) -> None:
    lost = [name for name in PRESETS[flag] if name not in close_names(name.replace("-", ""), PRESETS[flag])]
    assert lost == []


@pytest.mark.parametrize("flag", PRESETS)
@pytest.mark.parametrize("wrong", ["nothing-like-it", "h100"])
def test_an_unknown_preset_is_told_at_its_flag(flag: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = told(capsys, "predict", flag, wrong)
    assert line.startswith(f"{flag}: no preset is called {wrong!r}")
    assert "path of" in line


def test_an_unknown_preset_of_a_study_is_told_at_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "study.toml"
    study.write_text(GOOD.replace("llama3-8b", "lama").replace("[run]", 'stack = "fsdp"\n[run]'))
    assert [line.split(": no preset")[0] for line in told(capsys, "predict", str(study))] == [
        f"{study}: model",
        f"{study}: plan.stack",
    ]


def test_every_option_is_named_where_it_is_misspelled(capsys: pytest.CaptureFixture[str]) -> None:
    for path, command in commands(shardwise):
        for one in command.params:
            flag = one.opts[0]
            passes = command.context_settings.get("ignore_unknown_options")  # to the reader's own script
            if not isinstance(one, click.Option) or len(flag) < 5 or passes:
                continue
            assert main([*path, misspelled(flag), "1"]) == 2
            assert flag in capsys.readouterr().err.rpartition("Did you mean")[2], (path, flag)


def test_every_command_is_named_where_it_is_misspelled(capsys: pytest.CaptureFixture[str]) -> None:
    for path, _ in commands(shardwise):
        assert main([*path[:-1], misspelled(path[-1])]) == 2
        assert path[-1] in capsys.readouterr().err.rpartition("Did you mean")[2]


@pytest.mark.parametrize("root", ["plan", "model", "cluster", "device", "stack", "checkpoint", "kernels"])
def test_an_unknown_leaf_is_answered_with_known_ones(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = told(capsys, "predict", "--set", f"{root}.foo=1")
    assert line.startswith(f"--set {root}.foo: ")
    assert "known: " in line


def test_a_key_without_its_table_is_answered_with_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean plan.tp?" in told(capsys, "predict", "--set", "tp=2")[0]
    assert "did you mean cluster?" in told(capsys, "predict", "--set", "clustr.inter.latency_s=2us")[0]


def test_a_variable_of_nccl_is_text_without_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    told_by_text = [line.replace('"', "") for line in told(capsys, "predict", "--set", 'stack.nccl_env.NCCL_FOO="4"')]
    assert [
        line.replace('"', "") for line in told(capsys, "predict", "--set", "stack.nccl_env.NCCL_FOO=4")
    ] == told_by_text
    for key in ("stack.nccl_env", "stack.nccl.env"):
        assert main(["predict", "--model", "gpt2", "--set", f"{key}.NCCL_BUFFSIZE=4194304"]) == 0


@pytest.mark.parametrize("name", ["", *Plan.flat_names])
def test_a_misspelled_key_is_one_fault_with_the_right_key(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no name: of `model`, which then is missing too."""
    study = tmp_path / "study.toml"
    key = misspelled(name) if len(name) > 3 else name + name[-1:]
    plan = GOOD.replace("seq_len = 8192\n", f"{key} = 1\n")
    study.write_text(plan if name else GOOD.replace("model", "modle"))
    for verb in ("predict", "goodput"):
        (line,) = told(capsys, verb, str(study))
        assert line.endswith("?)")
        assert (name or "model") in line.rpartition("did you mean")[2]


@pytest.mark.parametrize("name", ["model", "cluster", "nodes", "placement", "calibration", "plan", "checkpoint", "run"])
def test_a_value_of_the_wrong_kind_is_one_fault(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "study.toml"
    tables = {"model": 'cluster = "hgx-h100-8"\n', "cluster": 'model = "llama3-8b"\n'}
    both = 'model = "llama3-8b"\ncluster = "hgx-h100-8"\n'
    study.write_text(f"{name} = false\n{tables.get(name, both)}" + ("" if name == "run" else "[run]\nsteps = 10\n"))
    (line,) = told(capsys, "goodput", str(study))
    assert line.startswith(f"{study}: {name}: must be ")


@pytest.mark.parametrize(
    "arguments", [["{}"], ["--model", "{}"], ["--plan", "{}"], ["--cluster", "{}"], ["--stack", "{}"]]
)
@pytest.mark.parametrize("text", ["import torch\n", None], ids=["a file", "missing"])
def test_python_is_answered_with_what_to_give_instead(
    arguments: list[str], text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "model.py"
    if text or "--plan" in arguments:  # a plan is judged by its text
        script.write_text(text or "import torch\n")
    (line,) = told(capsys, "predict", *(word.format(script) for word in arguments))
    assert "is Python code, which is not read here (" in line
    assert ".toml" in line


def test_a_file_that_is_missing_is_answered_with_the_one_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study.toml").write_text(GOOD)
    (line,) = told(capsys, "predict", str(tmp_path / "stduy.toml"))
    assert line.endswith(f"(did you mean {tmp_path / 'study.toml'}?)")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("compare --tp 8", "as --set plan.tp=VALUE"),
        ("search --dp-shard 8", "as --fix dp_shard=VALUE"),
    ],
)
def test_a_command_without_flags_of_a_plan_says_how_it_takes_one(
    capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert main(line.split()) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("wrong", "option"), [("--mbs", "--micro-batch-size"), ("--dtype", "--precision"), ("--ctx-len", "--seq-len")]
)
def test_an_option_by_a_name_that_tables_use_is_known(
    capsys: pytest.CaptureFixture[str], wrong: str, option: str
) -> None:
    assert main(["predict", wrong, "2"]) == ExitCode.USAGE
    assert f"Did you mean {option}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "name", "option"),
    [((), "train.sh", "--plan"), (("--model",), "sft.yml", "--plan"), ((), "config.json", "--model")],
)
def test_a_file_in_another_ones_place_is_told_whose_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], name: str, option: str
) -> None:
    (tmp_path / name).write_text('{"hidden_size": 8}' if name.endswith("json") else "torchrun train.py \\\n --tp 2\n")
    assert main(["predict", *flags, str(tmp_path / name)]) == ExitCode.BAD_INPUT
    assert f"{option} takes" in capsys.readouterr().err


def test_two_dashes_are_no_likeness(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", "--kind", "all_reduce"]) == ExitCode.USAGE
    assert capsys.readouterr().err.splitlines()[-1] == "Error: No such option '--kind'."
    assert main(["predict", "--bref"]) == ExitCode.USAGE
    assert capsys.readouterr().err.splitlines()[-1] == "Error: No such option '--bref'. Did you mean --brief?"
