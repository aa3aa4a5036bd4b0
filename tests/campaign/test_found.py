"""What the campaign has found, a case a kind: the input as it stands in seeds, and what was changed in it."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator.base import schema
from simulator.cli import main
from tests.campaign.seeds import seeds

Change = Callable[[bytes], bytes]


def _new(old: bytes, new: bytes) -> Change:
    return lambda data: data.replace(old, new, 1)


def _inside(old: bytes, new: bytes) -> Change:
    return lambda data: gzip.compress(gzip.decompress(data).replace(old, new, 1), mtime=0)


# What is wrong: (input, its file, the change, exit code, words of the answer)
FOUND = {
    "a type of adapter that is no text": ("adapter", "adapter_config.json", _new(b'"LORA"', b'{"a": 1}'), 3, "is not modelled"),
    "a power cap that no GPU could hold": ("tables of a study", "asked.toml", _new(b"[500, 400]", b"[1e-320]"), 3, "draws 126 W when it waits"),
    "a program without parameters": ("long run of a capture", "step.capture.gz", _inside(b"", b""), 0, ""),
    "a storage whose number is none": ("capture", "step.capture.gz", _inside(b'"categories": {"', b'"categories": {"0-9'), 3, "no storage's number"),
    "a capture that is nested deeply": ("trace beside a program", "step.capture.gz", lambda _: gzip.compress(b"[" * 100_000), 3, "no capture"),
    "a collective quicker than light": ("nccl json fit", "all_reduce.json", _new(b"56.3", b"1e-320"), 3, "different sizes"),
    "a sample without a time": ("samples check", "new.jsonl", lambda data: data + json.dumps({"kind": "adamw", "time_s": None, "parameters": 9}).encode() + b"\n", 1, "time_s = None is not a number"),
    "a degree that is no number": ("torchtitan plan", "job.toml", _new(b"degree = -1", b"degree = nan"), 3, "nan is not a whole number"),
    "a key of YAML that is a number": ("megatron yaml", "run.yaml", _new(b"  activation_func:", b"  8: 8\n  activation_func:"), 0, ""),
    "an operator whose arguments no release had": ("capture", "step.capture.gz", _inside(b'"aten.mm.default", [[["T"', b'"aten.mm.default", [[["aten.mm.default"'), 0, "priced by its bytes"),
    "a number of a model that is a table": ("model file", "mine.toml", _new(b"num_layers = 4", b"num_layers = {}"), 3, "num_layers: must be a whole number"),
    "samples whose end cannot be unpacked": ("samples fit", "samples.jsonl.gz", lambda data: data[:10] + b"\xff" * 4000, 3, "cannot be read"),
    "a pattern that Python warns of": ("plan axolotl-unfrozen.yml", "axolotl-unfrozen.yml", _new(b"+.self_attn.", b"[[[]]"), 3, "matches no parameter"),
    "ranks without end": ("rank mapping", "ranks.tsv", lambda data: data.partition(b"\n")[0] + b"\nx" * 2**18, 3, "the lines behind it were not read"),
    "lengths without end": ("lengths", "lengths.txt", lambda data: data + b"x=\n" * 2**18, 3, "and those behind it were not read"),
    "memory beyond all numbers": ("trace beside a program", "step.json.gz", lambda data: gzip.compress(re.sub(rb'"Total Reserved": \d+', b'"Total Reserved": ' + b"9" * 30, gzip.decompress(data))), 0, ""),
    "a trace that breaks off within its first operator": ("recorded", "step.json.gz", _inside(b'514,"Record function id"', b"514,--"), 3, "no operator ran in that step"),
    "network cards without number": ("cluster file", "mine.toml", _new(b"num_nics = 4", b"num_nics = 1" + b"0" * 400), 3, "a whole number beyond 2**128"),
    "clocks that a power of a thousand slows": ("calibration file", "mine.calibration.json", _new(b'"clock_exponent": ', b'"clock_exponent": 9999'), 3, "clock_exponent: must be at most 4"),
    "a table as large as a norm": ("config.json of gemma3_text", "config.json", lambda data: json.dumps({**json.loads(data), "vocab_size": 1}).encode(), 0, ""),
    "a word without end": ("slurm", "topology.conf", lambda data: data + b"a" * 2**20, 3, "is not KEY=VALUE"),
    "a search for next to no sequences": ("plans of a search", "plans.json", _new(b'"global_batch": 64', b'"global_batch": 1e-320'), 3, "is no export of a search"),
    "a rate of many digits": ("serving table", "serving.csv", _new(b"inf (all requests at once)", b"1" * 20_000 + b" x"), 0, "is no number of users"),
    "tensors without end": ("tensors", "t.csv", lambda data: data.partition(b"\n")[0] + b"\n,,," * 2**18, 3, "at least"),
    "a tensor whose shape is no numbers": ("capture", "step.capture.gz", _inside(b'"bf16", [64, 64]', b'"bf16", [-Infinity, 64]'), 3, "no tensor of this dtype, shape, strides"),
    "a storage that holds what nothing holds": ("capture", "step.capture.gz", _inside(b'": "temporaries"', b'": "aaa"'), 3, "what it holds"),
    "a GPU that all but stands still": ("cluster file", "mine.toml", _new(b"speed = 0.9", b"speed = 1e-320"), 3, "exceptions[0].speed"),
    "kernels that never end": ("calibration file", "mine.calibration.json", _new(b'"peak_flop_per_s": 312000000000000.0', b'"peak_flop_per_s": 1e-320'), 3, "peak_flop_per_s: must be 0 or 1e-15 to"),
    "an uncertainty beyond all numbers": ("calibration file", "mine.calibration.json", _new(b'"gemm": 0.04', b'"gemm": 1e300'), 3, "uncertainty.gemm: must be"),
    "a lesson beyond all numbers": ("learned", "mine.learned.json", _new(b'"value": 0.1', b'"value": 1e300'), 3, "value: must be at most 20"),
    "decoding that varies by next to nothing": ("tables of a study", "asked.toml", _new(b"decode_variation = 0.5", b"decode_variation = 1e-320"), 0, ""),
    "machines that serve no time": ("prices", "prices.toml", _new(b"years = 4.0", b"years = 1e-320"), 3, "years"),
    "mixtures that may be anything": ("stack file", "mine.toml", lambda data: data + b"\n[fitted]\nexperts_sigma = 1e300\n", 3, "experts_sigma"),
    "a switch whose name a terminal obeys": ("slurm", "topology.conf", _new(b"SwitchName=spine", b"SwitchName=\x00\x1b[2J"), 0, "\\x00\\x1b[2J: "),
    "a time below all numbers": ("samples check", "new.jsonl", lambda data: data + b'{"kind": "adamw", "parameters": 9, "time_s": -1' + b"0" * 400 + b"}\n", 1, "is not above 0"),
    "a module whose name is a number": ("capture", "step.capture.gz", _inside(b'"names": [', b'"names": [0, '), 3, "is no text"),
    "a count of thousands of digits": ("tuner", "tuner.csv", _new(b",8,-1", b",8," + b"9" * 5000), 3, "is not a count"),
    "a source of a number that has a number's name": ("calibrations diff", "new.calibration.json", _new(b'"nccl_communicator_bytes": "prior"', b'"p95": "prior"'), 0, ""),
    "measurements without end, of which none is read": ("collective on a table", "c.csv", lambda data: data + b"x\n" * 2**18, 3, "has more than 20,000 rows"),
    "measurements of which most are not read": ("collective on a table", "c.csv", lambda data: data + b"x\n" * 2**12, 0, "more"),
    "a program that runs nothing": ("long run of two captures", "a.capture.gz", lambda data: gzip.compress(json.dumps({**(one := json.loads(gzip.decompress(data))), "ranks": [{**rank, "events": []} for rank in one["ranks"]]}).encode()), 3, "nothing of it takes time"),
    "a number that is half a character": ("samples diff", "old.jsonl", lambda data: re.sub(rb'"num_ranks": \w+', rb'"num_ranks": "\\ud800"', data, count=1), 0, "ud800"),
    "many lines with unknown keys": ("slurm", "topology.conf", lambda data: data + b"\nx = 1" * 2**18, 3, "this line and those behind it were not read"),
    "a group that holds a rank twice": ("capture", "step.capture.gz", lambda data: gzip.compress(re.sub(rb'"groups": \[\[[0-9, ]*\]', b'"groups": [[0, 0]', gzip.decompress(data))), 3, "is no list of ranks"),
    "a group of something else than ranks": ("capture", "step.capture.gz", _inside(b'"groups": [[', b'"groups": [[[], '), 3, "is no list of ranks"),
    "a variable whose name has no end": ("launch line", "tune.sh", _new(b"$MODEL", b"$" + b"a" * 70_000), 3, "--base-model: hangs on $aaa"),
    "an option whose place is another option": ("megatron yaml", "run.yaml", _new(b"global_batch_size", b"globil_batch_size"), 3, "--global-batch-size?"),
    "a time of ages": ("samples check", "new.jsonl", lambda data: data + b'{"kind": "adamw", "parameters": 9, "time_s": 1e308}\n', 1, "time_s is longer than a year"),
    "a note with a character that a terminal obeys": ("megatron yaml", "run.args", _new(b"--micro", b"--no\x1bsuch 1 --micro"), 0, "no\\x1bsuch"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_change_that_was_a_fault_is_an_answer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    which, file, change, code, words = FOUND[name]
    (seed,) = (one for one in seeds(journals=False) if one.name == which)
    monkeypatch.chdir(tmp_path)
    for path, data in seed.files.items():
        Path(path).write_bytes(change(data) if path == file else data)
    assert main(list(seed.argv)) == code
    printed = capfd.readouterr()
    assert words in printed.err or (code == 0 and words in printed.out)
    assert "\x1b" not in printed.err
    assert max(map(len, printed.err.splitlines()), default=0) < 10_000
    assert len(printed.err.splitlines()) < 1_200


def test_a_page_of_a_check_with_work_that_was_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (seed,) = (one for one in seeds(journals=False) if one.name == "samples check")
    monkeypatch.chdir(tmp_path)
    for path, data in seed.files.items():
        lines = [line for line in data.splitlines(keepends=True) if path == "old.jsonl" or b'"gemm"' not in line]
        Path(path).write_bytes(b"".join(lines))
    assert main([*seed.argv, "--html", "page.html"]) == 1
    assert "not measured now" in Path("page.html").read_text()


def test_policies_whose_own_buffer_is_larger_than_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.campaign.seeds import EXAMPLES

    command = ["replay", str(EXAMPLES / "snapshot.json.gz"), "--compare-policies", "--capacity", "0.5GB", "--json"]
    assert main(command) == 4
    json.loads(capsys.readouterr().out)


def test_a_plan_whose_name_looks_like_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.campaign.seeds import EXAMPLES

    monkeypatch.chdir(tmp_path)
    Path("--json.yml").write_bytes((EXAMPLES / "axolotl.yml").read_bytes())
    assert main(["predict", "--plan", "--json.yml", "--model", "gpt2", "--gpus", "1xa100", "--plain"]) == 0


def test_a_command_that_works_spells_out_what_a_terminal_obeys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "be'll\x07\x1b\\run.args"
    Path(name).write_text("--num-layers 4 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 1\n")
    assert main(["predict", "--plan", name, "--cluster", "hgx-h100-8"]) == 3
    errors = capfd.readouterr().err
    assert not set("\x07\x1b") & set(errors)
    (command,) = (line.partition("in: ")[2] for line in errors.splitlines() if "put your own values in" in line)
    words = subprocess.run(["/bin/bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, check=True).stdout
    assert name in words.decode().splitlines()


def test_a_journal_has_at_least_one_engine() -> None:
    from simulator.studies.serving_search.notes import ANSWER

    fewest = {"role": "both", "layout": "{}", "engines": 1, "plays": []}
    assert ANSWER.validate_python(fewest).engines == 1
    with pytest.raises(ValueError, match="engines"):
        ANSWER.validate_python({**fewest, "engines": 0})


def test_a_name_among_many_is_found_in_little_time() -> None:
    """Hints for names of a file of twenty thousand are found among those of about its length."""
    from simulator.base.value_errors import close_names

    names = [f"switch{number:05}" for number in range(20_000)] + ["leaf-12"]
    assert close_names("leaf12", names)[0] == "leaf-12"


@pytest.mark.parametrize("number", ["0x" + "f" * 6000, "0b" + "1" * 20_000, "0o" + "7" * 6000])
def test_a_number_that_python_reads_and_does_not_print_is_refused(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    machine = ["--model", "gpt2", "--gpus", "1xa100", "--plain"]
    Path("study.toml").write_text(f"[plan]\nno_such = {number}\n")
    Path("axolotl.yml").write_text(f"base_model: gpt2\nmicro_batch_size: 1\nno_such: {number.replace('0o', '0x')}\n")
    for words in (
        ["study.toml"],
        ["--plan", "axolotl.yml", *machine],
        [*machine, "--set", f"plan.offload={{a={number}}}"],
    ):
        assert main(["predict", *words]) == 3
        errors = capfd.readouterr().err
        assert "a whole number beyond 2**128" in errors or "--set plan.offload" in errors


@pytest.mark.parametrize("field", ["forward_prefetch", "backward_prefetch"])
def test_further_ahead_than_there_are_units_is_all_of_them(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    steps = []
    for count in (99, 2**31 - 1):
        command = ["predict", "--model", "gpt2", "--cluster", "hgx-h100-8", "--set", f"plan.{field}={count}", "--json"]
        assert main(command) == 0
        steps.append(json.loads(capsys.readouterr().out)["step_s"])
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    "settings",
    [
        ["plan.data_parallel=deepspeed", "plan.zeropp.secondary_ranks=2147483647"],
        ["plan.pp=2", "plan.virtual_stages=2147483647", "plan.schedule=interleaved"],
        ["model.num_heads=2147483647", "plan.tp=2"],
    ],
)
def test_a_remedy_for_a_number_without_end_is_found_at_once(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for one in settings for word in ("--set", one)]
    assert main(["predict", "--model", "gpt2", "--cluster", "hgx-h100-8", *words]) == 3
    assert "fault" in capsys.readouterr().err


def test_groups_of_an_optimizer_without_end_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    offloaded = ["data_parallel=deepspeed", "offload.optimizer=host", "offload.sub_group_numel=1"]
    words = [word for one in offloaded for word in ("--set", f"plan.{one}")]
    assert main(["predict", "--model", "gpt2", "--cluster", "hgx-h100-8", *words]) == 3
    assert "groups of a rank's parameters; at most 20,000 are played" in capsys.readouterr().err


_GPT2 = "--model gpt2 --cluster hgx-h100-8"
# A command line, its exit code, words of its errors
REFUSED = {
    f"goodput {_GPT2} --tokens 1B --straggler-slowdown {{distribution='lognormal',median=2}}": "--straggler-slowdown: sigma: is missing",
    f"goodput {_GPT2} --tokens 1B --straggler-slowdown {{median=2}}": "'distribution' must be one of exponential, lognormal, uniform; it is missing",
    f"goodput {_GPT2} --tokens 1B --straggler-slowdown {{distribution='gauss'}}": 'must be one of exponential, lognormal, uniform; it is "gauss"',
    f"goodput {_GPT2} --tokens 1B --set run.straggler_slowdown.sigma=3": "--set run.straggler_slowdown.sigma: 'distribution' must be",
    f"serve {_GPT2} --rate 1 --requests 3 --prompt {{distribution='lognormal',median=1,sigma=1}}": "--prompt: high: is missing",
    f"predict {_GPT2} --offload {{prefetch=-1}}": "--offload: prefetch: must be at least 0",
    f"predict {_GPT2} --stack foo": "are known, as ",
    f"explore {_GPT2} --vary plan.tp=1..8": "1..8 is a range (name each value",
    f"predict {_GPT2} --set device.hypervisor_bytes=1TB": "leaves none of its memory of 79.1 GiB",
    f"predict {_GPT2} --set device.power_w=5e-324": "power_w: must be at least 1",
    f"export {_GPT2} --seq-len 256 --num-micro-batches 100000 --pp 2 --to chakra -o traces": " nodes (at most 2,000,000)",
    f"predict {_GPT2} --set stack.kernels.loss_metrics=2147483647": "must be at most 100",
    f"predict {_GPT2} --set model.num_layers=5000": "must be at most 4096",
    f"predict {_GPT2} --set stack.kernels=[]": "stack.kernels: must be a table; it is the list []",
    f"compare {_GPT2} --what-if plan.tp=2 --set cluster.device=[]": "cluster.device: must be a table; it is the list []",
    f"predict {_GPT2} --set cluster.fabric.speed=1e-320": "cluster.fabric.speed: must be at least 1e-06",
    "replay docs/examples/study.toml": "it is no snapshot: neither a pickle nor JSON",
}  # fmt: skip


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_refused_is_named_with_its_key_and_what_would_be_right(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.campaign.seeds import ROOT

    monkeypatch.chdir(ROOT)
    assert main(command.split()) == 3
    assert REFUSED[command] in capsys.readouterr().err


# What a sweep of each key and flag found: a record of the plan set as a whole, and steps of sizes beyond all numbers
ANSWERED = (f"predict {_GPT2} --seq-len 256 --brief --set plan.fsdp={{}}", "collective all_reduce --gpus 16xa100 --size 1MB:4MB --factor 1e308")  # fmt: skip


@pytest.mark.parametrize("command", ANSWERED)
def test_a_value_that_was_a_traceback_is_answered(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 0
    assert capsys.readouterr().out


def test_a_wrong_word_in_every_row_is_compared_with_the_known_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(schema, "close_names", lambda name, known: compared.append(name) or list(known)[:1])
    for _ in range(3):
        assert schema.nearest("a word of this test", ["full", "none"]) == "did you mean full?"
    assert compared == ["a word of this test"]


@pytest.mark.parametrize("filler", [b" ", b"\n", b","])
def test_a_trace_of_nothing_but_filler_is_read_at_its_speed(filler: bytes, tmp_path: Path) -> None:
    import time

    from simulator.formats.readers.json_stream import Broken, JsonStream, open_text

    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(b"[" + filler * 2**25, 1))
    before_s = time.process_time()
    with open_text(file) as text, pytest.raises(Broken):
        list(JsonStream(text, "traceEvents").items())
    assert time.process_time() - before_s < 1  # a character at a time takes several


@pytest.mark.parametrize("setting", ["data.workers=0", "data.prefetch=1023"])
def test_a_step_that_does_not_wait_for_data_waits_no_negative_time(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    qlora = "--model llama3.2-1b --gpus 1xa100 --peft qlora --base-weights nf4_double --seq-len 512"
    assert main(["predict", *qlora.split(), "--set", setting, "--json"]) == 0
    assert min(json.loads(capsys.readouterr().out)["breakdown_s"].values()) >= 0


@pytest.mark.parametrize("date", ["abc", "-1", "9" * 30])
def test_pictures_hold_no_date_whatever_the_environment_says(
    date: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    from simulator.formats.drawing import drawn

    monkeypatch.setenv("SOURCE_DATE_EPOCH", date)
    with drawn(tmp_path / "x.svg", "--memory", (2, 2)) as figure:
        figure.text(0.5, 0.5, "x")
    assert b"dc:date" not in (tmp_path / "x.svg").read_bytes()
    assert os.environ["SOURCE_DATE_EPOCH"] == date


@pytest.mark.parametrize("way", ["megatron", "deepspeed"])
def test_gpipe_over_several_chunks_is_torchs(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Stages that wait for their messages waited for each other for ever."""
    chunks = ["--set", "plan.pipeline.virtual_stages=2", "--num-micro-batches", "4", "--zero", "1", "--seq-len", "256"]
    command = ["predict", "--model", "gpt2", "--cluster", "hgx-h100-8", "--pp", "2", "--schedule", "gpipe", *chunks]
    assert main([*command, "--data-parallel", way]) == 3
    assert "only torch's pipelines" in capsys.readouterr().err


def test_a_page_of_servers_that_answer_with_one_token(tmp_path: Path) -> None:
    """They have no time between tokens."""
    load = ["--requests", "20", "--rate", "100", "--prompt", "8", "--output", "1"]
    page = tmp_path / "page.html"
    assert main(["serve", "--model", "gpt2", "--cluster", "hgx-h100-8", *load, "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "first token p50" in text
    assert "between tokens p50" not in text


def test_megabytes_that_could_be_python_are_no_script(tmp_path: Path) -> None:
    """Its tree took 2.6 GB of a file of 6 MB."""
    from simulator.formats.readers.capture import kind_of

    script, long = tmp_path / "step", tmp_path / "long"
    script.write_text("import torch\n" + "x = 1\n" * 100)
    long.write_text("import torch\n" + "x = 1\n" * 2**18)
    assert (kind_of(script), kind_of(long)) == ("script", "other")
    assert kind_of(long.rename(tmp_path / "long.py")) == "script"  # nobody need read it to know


def test_blank_lines_of_a_table_cost_little_and_hide_nothing(tmp_path: Path) -> None:
    """Six million took 13 s. A quote that is not closed looks ahead over them, and what stands behind is a row of its own."""
    from simulator.formats.readers.csv_table import open_table

    file = tmp_path / "table.csv"
    file.write_text('id,x\n\n \na,1\n"b\n\nb",2\n\nc,"3\n\n\nd,4\n' + "\n" * 2**12)
    with open_table(file, ["id", "x"], ["id"]) as (header, records):
        assert header == ["id", "x"]
        found = [(record.line, record.cells) for record in records]
    assert found[:2] == [(4, ["a", "1"]), (5, ["b\n\nb", "2"])]
    assert [line for line, _ in found] == [4, 5, 9, 12]
    assert found[3] == (12, ["d", "4"])


def test_links_that_lead_round_in_a_circle_are_files_that_cannot_be_read_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").symlink_to("there")
    Path("there").symlink_to("here")
    asked = ["predict", "--model", "gpt2", "--cluster", "hgx-h100-8"]
    for words in (["predict", "here", "--trace", "here"], [*asked, "--trace", "here"], [*asked, "--html=there"]):
        assert main(words) == 3
        assert "Too many levels of symbolic links" in capsys.readouterr().err
    assert main(["calibrate", "fit", "no-such.jsonl", "-o", "here"]) == 3
    assert Path("here").is_symlink()
