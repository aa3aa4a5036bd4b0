"""`shardwise predict`: what reaches predict(), how faults are told, and what the exit code says."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import simulator.cli.predict as verb
from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.study import read_study
from simulator.formats.study.overrides import literal
from simulator.formats.writers.text import render, render_brief, to_text
from simulator.predict import Prediction, predict
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

ROOT = Path(__file__).resolve().parents[2]
PLAN = Plan(dp_shard=8, zero=3, seq_len=8192)


@dataclass
class Asked:
    """Stands in for predict(): keeps what it was asked and answers with a prediction written by hand."""

    answer: Prediction
    model: Model = field(init=False)
    plan: Plan = field(init=False)
    cluster: Cluster = field(init=False)
    calibration: Calibration | None = field(init=False)
    stack: Stack | None = field(init=False)

    def __call__(
        self,
        model: Model,
        plan: Plan,
        cluster: Cluster,
        calibration: Calibration | None,
        stack: Stack | None,
        *,
        advise: bool,
    ) -> Prediction:
        assert advise
        self.model, self.plan, self.cluster, self.calibration, self.stack = model, plan, cluster, calibration, stack
        return self.answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, made_prediction: Prediction) -> Asked:
    double = Asked(made_prediction)
    monkeypatch.setattr(verb, "predict", double)
    return double


def study(tmp_path: Path, text: str) -> str:
    file = tmp_path / "study.toml"
    file.write_text(text)
    return str(file)


GOOD = 'model = "llama3-8b"\ncluster = "hgx-h100-8"\n[plan]\nseq_len = 4096\nzero = 3\n'


def faults(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The faults that a command line is refused with, after checking that it is refused properly."""
    assert main(["predict", *arguments]) == ExitCode.BAD_INPUT
    out, err = capsys.readouterr()
    assert not out
    assert "Traceback" not in err
    head, *lines = err.splitlines()
    assert f"{len(lines)} fault" in head
    return [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("capacity_gib", "verdict", "code"), [(80, "FITS", 0), (58, "TIGHT", 0), (50, "DOES NOT FIT", 4)]
)
def test_the_exit_code_says_whether_it_fits(
    asked: Asked, capacity_gib: int, verdict: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = replace(asked.answer.memory, capacity_bytes=capacity_gib * 2**30)
    asked.answer = replace(asked.answer, memory=memory)
    assert main(["predict"]) == code
    assert capsys.readouterr().out.startswith(verdict)


def test_without_arguments_the_embedded_default_is_asked_and_said_to_be_assumed(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["predict", "--json"])
    assert (asked.model.name, asked.cluster.name, asked.plan.dp_shard) == ("llama3-8b", "hgx-h100-8", 8)
    assert asked.plan.implementation == "fsdp2"
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert {s["kind"] for s in sources if s["what"] in ("model", "cluster", "plan")} == {"assumed"}
    assert any("dp_shard = 8" in s["detail"] for s in sources)


def test_flags_override_the_file_and_are_said_to(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(
        [
            "predict",
            study(tmp_path, GOOD),
            "--seq-len",
            "2048",
            "--nodes",
            "2",
            "--set",
            "plan.micro_batch_size=4",
            "--json",
        ]
    )
    assert (asked.plan.seq_len, asked.plan.micro_batch_size, asked.plan.dp_shard) == (2048, 4, 16)
    document = json.loads(capsys.readouterr().out)
    assert document["inputs"]["nodes"] == 2
    assert "seq_len = 2048, micro_batch_size = 4 (flags)" in [s["detail"] for s in document["sources"]]


def test_degrees_that_are_given_are_kept(asked: Asked) -> None:
    main(["predict", "--nodes", "2", "--dp-shard", "8", "--dp-replicate", "2"])
    assert (asked.plan.dp_shard, asked.plan.dp_replicate) == (8, 2)


def test_nothing_sharded_means_everything_replicated(asked: Asked) -> None:
    main(["predict", "--zero", "0"])
    assert (asked.plan.dp_shard, asked.plan.dp_replicate) == (1, 8)


def test_another_model_leaves_the_default_plan_out(asked: Asked) -> None:
    main(["predict", "--model", "gpt2"])
    assert asked.plan.seq_len == Plan().seq_len


def test_a_field_with_a_flag_and_a_set_is_set_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """One of the two was taken without a word; here beside a fault of its own."""
    found = faults(capsys, "--recompute", "full", "--set", "plan.recompute.mode=none", "--set", "plan.nonsense=1")
    assert len(found) == 2
    assert any("--set plan.recompute.mode: is set twice, by --recompute too" in one for one in found)


def test_set_reaches_every_noun(asked: Asked) -> None:
    settings = {
        "model.num_layers": "40",
        "device.memory_bytes": "96GiB",
        "cluster.inter.nic_bytes_per_s": "400Gb/s",
        "stack.host_launch_s": "5us",
        "plan.bucket_bytes": "50MiB",
    }
    assert main(["predict", *(arg for key, text in settings.items() for arg in ("--set", f"{key}={text}"))]) == 0
    assert asked.model.num_layers == 40
    assert asked.cluster.device.usable_bytes == 96 * 2**30
    assert asked.cluster.inter is not None
    assert asked.cluster.inter.nic_bytes_per_s == 50e9
    assert asked.stack is not None
    assert asked.stack.host.launch_s == 5e-6
    assert asked.plan.ddp.bucket_bytes == 50 * 2**20


def test_a_set_is_among_the_sources(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", "--set", "device.memory_bytes=96GiB", "--json"])
    assert {"what": "device.memory_bytes", "kind": "given", "detail": "96GiB (--set)"} in json.loads(
        capsys.readouterr().out
    )["sources"]
    assert asked.cluster.sources["device"].startswith("given")


@pytest.mark.parametrize("name", ["ideal", "datasheet"])
def test_calibrations_can_be_made_of_the_device(asked: Asked, name: str) -> None:
    main(["predict", "--calibration", name])
    assert asked.calibration is not None
    assert asked.calibration.kind == name


def test_paths_in_a_file_are_relative_to_it(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text((ROOT / "topologies/hgx-h100-8.toml").read_text())
    monkeypatch.chdir(ROOT)
    assert main(["predict", study(tmp_path, GOOD.replace("hgx-h100-8", "mine.toml"))]) == 0
    assert asked.cluster.num_devices == 8


@pytest.mark.parametrize(
    ("arguments", "where", "remedy"),
    [
        (["--set", "cluster.inter.bytes_per_s=400Gb/s"], "--set cluster.inter.bytes_per_s", "nic_bytes_per_s"),
        (["--set", "cluster.inter.nic_bytes_per_s=400GB"], "--set cluster.inter.nic_bytes_per_s", "400GB/s"),
        (["--set", "device.memory_bytes=96"], "--set device.memory_bytes", "96B"),
        (["--set", "model.num_layer=40"], "--set model.num_layer", "num_layers"),
        (["--set", "plan.dpshard=8"], "--set plan.dpshard", "dp_shard"),
        (["--set", "plans.dp_shard=8"], "--set plans.dp_shard", "plan"),
        (["--set", "plan.dp_shard"], "--set plan.dp_shard", "--set plan.dp_shard=VALUE"),
        (["--set", "plan.zero=1", "--set", "plan.zero=2"], "--set plan.zero", "keep one"),
        (["--model", "llama3-8"], "--model", "llama3-8b"),
        (["--cluster", "hgx-h100-9"], "--cluster", "hgx-h100-8"),
        (["--stack", "torch-2.6-eagre"], "--stack", "torch-2.6-eager"),
        (["--bucket-bytes", "25"], "--bucket-bytes", "25B"),
        (["--recompute", "fulll"], "--recompute", "did you mean full?"),
        (["--nodes", "0"], "--nodes", "must be at least 1"),
        (["--nodes", "99999999999999999999"], "--nodes", "must be at most 65536"),
        (["--data-parallel", "ddp"], "plan: zero", "zero = 0"),
    ],
)
def test_a_fault_has_its_place_and_what_would_be_right(
    arguments: list[str], where: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = faults(capsys, *arguments)
    assert line.startswith(where)
    assert remedy in line


def test_all_faults_of_all_inputs_are_told_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = study(
        tmp_path, 'model = "lama3-8b"\ncluster = "hgx-h1000-8"\nnode = 2\n[plan]\nzero = 4\nbucket_bytes = 25\n'
    )
    lines = faults(capsys, file, "--set", "device.memory=1GiB", "--set", "nonsense", "--calibration", "h1000")
    places = [line.rsplit(": ", 1)[0] for line in lines]
    assert len(lines) == 7
    for place in (f"{file}: node", f"{file}: plan.zero", f"{file}: plan.bucket_bytes", "--set nonsense"):
        assert any(found.startswith(place) for found in places)


def test_a_field_of_the_wrong_type_hides_no_other_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What rests on the unknown field is not judged; the rest is."""
    text = 'model = "llama3-8b"\ncluster = "hgx-h100-8"\n[plan]\ncp = 2\nseq_len = 4097\n'
    wrong = study(tmp_path, text + 'tp = "3"\nvirtual_stages = 33\n')
    told = " ".join(faults(capsys, wrong))
    assert 'must be a whole number; it is the text "3"' in told
    assert "4097 is not a multiple of 2 × cp" in told
    assert "33" in told
    assert "degrees" not in told  # tp may be anything
    unknown = " ".join(faults(capsys, study(tmp_path, text + "ttp = 3\ndp_shard = 2\n")))
    assert "did you mean tp" in unknown
    assert "4097" in unknown
    assert "degrees" not in unknown
    assert "degrees" in " ".join(faults(capsys, study(tmp_path, text + 'recompute = "al"\ndp_shard = 2\n')))


@pytest.mark.parametrize("name", sorted(Plan.flat_fields()))
def test_any_field_may_be_unknown(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An array of arrays is of no field's type."""
    text = f'model = "llama3-8b"\ncluster = "hgx-h100-8"\n[plan]\n{name} = [[]]\ntpp = 1\n'
    told = " ".join(faults(capsys, study(tmp_path, text)))
    assert f"plan.{name}" in told
    assert "tpp" in told


def test_a_table_that_is_wrong_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    told = faults(capsys, "--set", "plan.offload.optimizer=cpu", "--set", "plan.offload.delayed=true", "--tp", "3")
    assert any('; it is "cpu"' in line for line in told)
    assert any("tp = 3 does not divide the model's 32 heads" in line for line in told)
    assert not any("delayed" in line for line in told)  # it hangs on the optimizer's place


def test_a_whole_noun_is_not_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert faults(capsys, "--set", "plan=3") == ["--set plan: is a table (--set plan.KEY=VALUE)"]


def test_a_study_without_a_noun_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert any("model: is missing" in line for line in faults(capsys, study(tmp_path, 'cluster = "hgx-h100-8"\n')))
    told = " ".join(faults(capsys, study(tmp_path, "[plan]\ntp = 1\n")))
    assert "model: is missing" in told
    assert "cluster: is missing" in told


def test_a_list_where_a_word_is_due_is_shown_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": [3]}, "train_batch_size": [], "bf16": {"enabled": [true]}}')
    told = " ".join(faults(capsys, "--plan", str(file)))
    for words in ("stage: [3] is not a whole number", "train_batch_size: [] is not", "enabled: [true] is neither"):
        assert words in told


def test_a_noun_that_cannot_be_read_hides_no_fault_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    without_cluster = faults(capsys, "--cluster", "nosuch", "--tp", "3", "--pp", "33")
    assert any("tp = 3 does not divide the model's 32 heads" in line for line in without_cluster)
    assert any("pp = 33 for 32 layers" in line for line in without_cluster)
    without_model = faults(capsys, "--model", "nosuch", "--tp", "3", "--dp-shard", "3")
    assert any("= 9, the cluster has 8 devices" in line for line in without_model)
    without_count = faults(capsys, "--nodes", "two", "--tp", "3", "--dp-shard", "3")
    assert any("does not divide the model's 32 heads" in line for line in without_count)
    assert not any("degrees" in line for line in without_count)


@pytest.mark.parametrize(
    "text",
    [
        "model = ",
        'model = "a"\nmodel = "b"\n',
        "\x00",
        "plan = 3\n" + GOOD.partition("[plan]")[0],
        GOOD + "seq_len2 = nan\n",
        GOOD + "micro_batch_size = inf\n",
        GOOD.replace("4096", "9" * 5000),
        GOOD.replace('"llama3-8b"', '"' + "x" * 5000 + '"'),
        GOOD + "x = " + "[" * 5000,
    ],
)
def test_hostile_files_are_refused_without_a_traceback(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert faults(capsys, study(tmp_path, text))


@pytest.mark.parametrize("path", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_a_fault(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert faults(capsys, path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{distribution=lognormal,median=1s,sigma=1}", {"distribution": "lognormal", "median": "1s", "sigma": 1}),
        ("{a={b=bf16}, c=400Gb/s, d=1e5, e=0x10, f=true}", {"a": {"b": "bf16"}, "c": "400Gb/s", "d": 1e5, "e": 16, "f": True}),
        ('{a = "x=y,z"}', {"a": "x=y,z"}),
        ('{a = "x=y,z", b=400Gb/s}', '{a = "x=y,z", b=400Gb/s}'),  # quotes and none: as it stands
        ("{a=", "{a="),
    ],
)  # fmt: skip
def test_words_in_a_table_need_no_quotes_either(text: str, value: object) -> None:
    """As bf16 and 400Gb/s alone; a distribution was refused as "must be a number; it is the text"."""
    assert literal(text) == value


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_setting_is_taken_or_refused(key: str, text: str) -> None:
    try:
        assert read_study(None, {}, {}, [f"plan.{key}={text}"]).plan
    except InputError as exc:
        assert exc.faults  # noqa: PT017  both outcomes are legal


def test_literals_are_read_as_in_toml_or_are_text() -> None:
    texts = ["2", "true", "1.5", ".5", ".5GiB", "bf16", "400Gb/s", '"2"', "1\nplan = 2", "9" * 5000]
    assert [literal(text) for text in texts] == [
        2,
        True,
        1.5,
        0.5,
        ".5GiB",
        "bf16",
        "400Gb/s",
        "2",
        "1\nplan = 2",
        "9" * 5000,
    ]


@pytest.mark.usefixtures("asked")
def test_trace_is_written_beside_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json.gz"
    assert main(["predict", "--trace", str(path)]) == 0
    assert "traceEvents" in json.loads(gzip.decompress(path.read_bytes()))
    out, err = capsys.readouterr()
    assert out.startswith("FITS")
    assert str(path) in err


def test_every_field_of_a_plan_is_a_flag_and_documented(capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", "--help"])
    text = capsys.readouterr().out
    page = (ROOT / "docs/reference/plan-file.md").read_text()
    assert [name for name in Plan.flat_fields() if f"--{name.replace('_', '-')}" not in text] == []
    assert [name for name in Plan.flat_fields() if f"`{name}`" not in page] == []


def test_the_embedded_default_is_predicted_and_twice_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for _ in range(2):
        assert main(["predict", "--json"]) in (ExitCode.OK, ExitCode.DOES_NOT_FIT)
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    document = json.loads(answers[0])
    assert sum(document["breakdown_s"].values()) == pytest.approx(document["step_s"])
    assert document["lower_s"] <= document["step_s"] <= document["upper_s"]
    assert document["low_s"] <= document["step_s"] <= document["high_s"]


@pytest.mark.parametrize(
    "flag", ["--seq-len", "--micro-batch-size", "--num-micro-batches", "--bucket-bytes", "--dp-shard"]
)
def test_absurd_sizes_have_an_answer_or_a_fault(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    number = "1" + "0" * 400
    code = main(["predict", "--calibration", "datasheet", flag, number + ("B" if flag == "--bucket-bytes" else "")])
    assert code in (ExitCode.OK, ExitCode.BAD_INPUT, ExitCode.DOES_NOT_FIT)
    assert "Traceback" not in capsys.readouterr().err


PLANS = ROOT / "tests" / "data" / "plans"


def test_a_plan_of_another_framework(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--plan", str(PLANS / "gpt-175b.sh"), "--cluster", "dgx-a100-80-8", "--json"]) in (0, 4)
    answer = json.loads(capsys.readouterr().out)
    assert asked.cluster.num_devices == 1024  # the script's, as nobody said how many nodes
    assert (asked.plan.tp, asked.plan.pp, asked.plan.dp_shard) == (8, 16, 8)
    assert asked.model.num_layers == 96
    assert asked.stack is not None
    assert (asked.stack.name, asked.stack.overlap.tp) == ("megatron-core-2025", "backward")
    imported = answer["inputs"]["imported"]
    assert imported["format"] == "megatron"
    assert {"used", "no effect"} == {setting["use"] for setting in imported["settings"]}


def test_flags_stand_over_an_imported_plan(asked: Asked) -> None:
    plan = str(PLANS / "llama3-70b.toml")
    assert main(["predict", "--plan", plan, "--nodes", "2", "--tp", "4", "--stack", "torch-2.6-eager"]) in (0, 4)
    assert (asked.plan.tp, asked.plan.dp_shard, asked.model.name) == (4, 4, "llama3-70b")
    assert asked.stack is not None
    assert asked.stack.name == "torch-2.6-eager"


def test_what_an_import_leaves_out_is_told_on_stderr(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del asked
    file = tmp_path / "ds.json"
    data = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "round_robin_gradients": True, "stge": 1},
    }
    file.write_text(json.dumps(data))
    flags = ["--model", "llama2-7b", "--seq-len", "2048", "--recompute", "none"]
    assert main(["predict", "--plan", str(file), *flags]) in (0, 4)
    err = capsys.readouterr().err
    assert "not modelled: " in err
    assert "round_robin_gradients = true" in err
    assert "unknown, and ignored: " in err
    assert "did you mean zero_optimization.stage" in err


def test_faults_of_an_imported_plan_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 4}}')
    assert main(["predict", "--plan", str(file), "--cluster", "nowhere"]) == ExitCode.BAD_INPUT
    err = capsys.readouterr().err
    for words in ("does not state the model", "there is no stage 4", "nowhere"):
        assert words in err
    assert main(["predict", "--plan", str(file), "--plan-format", "yaml"]) == ExitCode.BAD_INPUT
    assert "--plan-format: 'yaml' is not a format" in capsys.readouterr().err
    assert main(["export", "--model", "gpt2", "--cluster", "hgx-h100-8", "--to", "nosuch"]) == ExitCode.BAD_INPUT
    assert "chakra" in capsys.readouterr().err
    assert main(["predict", "--plan", str(file), "--define", "X"]) == ExitCode.BAD_INPUT
    assert main(["predict", "--define", "X=1"]) == ExitCode.USAGE
    assert main(["predict", "--plan", str(tmp_path / "none")]) == ExitCode.BAD_INPUT


def test_a_job_that_is_no_whole_nodes(asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "line.sh"
    file.write_text(
        "torchrun --nproc_per_node 12 t.py --micro-batch-size 1 --seq-length 2048 --bf16 --num-layers 2"
        " --hidden-size 512 --num-attention-heads 8 --max-position-embeddings 2048 --vocab-size 1000"
    )
    assert main(["predict", "--plan", str(file)]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "the job's 12 GPUs are not whole nodes of hgx-h100-8" in told
    assert f"shardwise predict --plan {file} --nodes 2" in told
    file.write_text(file.read_text().replace("node 12", "node 4"))  # a part of a node
    assert main(["predict", "--plan", str(file)]) in (0, 4)
    assert (asked.cluster.num_nodes, asked.cluster.gpus_per_node) == (1, 4)
    file.write_text(file.read_text().replace("node 4", "node 3 --nnodes 2"))
    assert main(["predict", "--plan", str(file)]) in (0, 4)
    assert (asked.cluster.num_nodes, asked.cluster.gpus_per_node) == (2, 3)


def test_faults_of_an_imported_plan_come_with_those_of_its_degrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": "auto"}
    zero = {"zero_optimization": {"stage": 5}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config | zero))
    given = ["--plan", str(tmp_path / "ds.json"), "--cluster", "hgx-h100-8", "--nodes", "2"]
    assert main(["predict", *given]) == 3
    told = capsys.readouterr().err
    for part in (
        "does not state the model",
        "no stage 5",
        "micro-batch 3 × ranks 16 = 48 (48",
    ):
        assert part in told
    assert "auto" not in told  # it follows from the other two
    rest = ["--model", "llama3-8b", "--seq-len", "4095", "--recompute", "full", "--tp", "3", "--cp", "2"]
    assert main(["predict", *given, *rest, "--prefetch-bucket-numel", "x"]) == 3
    told = capsys.readouterr().err
    for part in ("tp 3 × cp 2 × pp 1 = 6 does not divide 16 GPUs", "no stage 5", "must be a whole number"):
        assert part in told
    assert main(["predict", *given, *rest]) == 3
    told = capsys.readouterr().err
    assert "4095 is not a multiple of 2 × cp" in told
    assert "tp = 3 does not divide the model's 32 heads" in told
    assert "sequences a step" not in told  # nobody knows the ranks


def test_a_flavor_that_is_no_preset_is_told_with_those_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[model]\nname = "llama3"\nflavor = "7B"\n[training]\nlocal_batch_size = 1\nseq_len = 512\n')
    assert main(["predict", "--plan", str(file)]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "model.flavor: llama3 7B is not a preset; of llama3 debugmodel, " in told
    assert "8B, 8B_flex, 8B_varlen, 70B, 405B, 1B, 3B are (--model NAME or FILE)" in told
    assert main(["predict", "--plan", str(file), "--model", "llama3-8b"]) in (ExitCode.OK, ExitCode.DOES_NOT_FIT)


def test_a_flavor_that_cannot_be_read_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[model]\nname = "llama3"\nflavor = []\n[training]\nlocal_batch_size = 1\nseq_len = 512\n')
    assert main(["predict", "--plan", str(file)]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "1 fault in the input" in told
    assert "model.flavor: [] is not text" in told
    file.write_text('[model]\nname = "llama3"\n[training]\nlocal_batch_size = []\nseq_len = 512\n')
    assert main(["predict", "--plan", str(file)]) == ExitCode.BAD_INPUT
    assert "does not state the model (--model NAME or FILE)" in capsys.readouterr().err


def test_what_degrees_do_not_divide_is_told_beside_a_script_s_other_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "torchrun --nnodes 2 --nproc_per_node 8 t.py --micro-batch-size 1 --seq-length {} --bf16 --num-layers 8{}"
        " --num-attention-heads 8 --max-position-embeddings 2048 --vocab-size 1000 --num-experts 8"
        " --tensor-model-parallel-size {} --expert-model-parallel-size 3 --sequence-parallel"
    )
    for length, width, tp in ((2048, "", 2), ("x", " --hidden-size 512", 3)):
        file = tmp_path / "line.sh"
        file.write_text(line.format(length, width, tp))
        assert main(["predict", "--plan", str(file), "--cluster", "hgx-h100-8"]) == ExitCode.BAD_INPUT
        told = capsys.readouterr().err
        nearest = "ep = 2" if width else "2"  # the mesh tells it of a model that could be built
        assert f"3 does not divide the model's 8 experts ({nearest})" in told
        assert told.count("experts") == 1
        assert ("is required and missing" in told) is (not width)
        assert ("divide the model's 8 heads" in told) is (tp == 3)


def test_files_that_cannot_be_written_are_told_at_once_and_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = str(tmp_path / "gone" / "x")
    arguments = [
        "--trace",
        gone,
        "--snapshot",
        gone + "y",
        "--memory",
        "m.txt",
        "--links",
        gone + ".svg",
        "--pp",
        "x",
    ]
    assert main(["predict", *arguments]) == 3
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("shardwise: 5 faults")
    for part in (
        f"--trace {gone}: there is no folder",
        f"--snapshot {gone}y: there is no folder",
        "--memory m.txt: is not a picture",
    ):
        assert part in told.err


# --- one screen


TOLD = "GiB of 79.1 GiB needed", "most of the time: ", "To try next\n  1. ", "\n  step  "


def test_what_decides_is_on_the_first_screen_and_a_brief_report_is_no_more() -> None:
    made = predict(Model.load("llama3-8b"), PLAN, Cluster.load("hgx-h100-8"), advise=True)
    whole = to_text(render(made), width=80).splitlines()[:24]
    brief = to_text(render_brief(made), width=80).splitlines()
    assert len(brief) <= 24
    assert max(map(len, brief)) <= 80
    for told in TOLD:
        assert told in "\n".join(whole)
        assert told in "\n".join(brief)


def test_brief_is_an_option(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", "--brief"])
    assert capsys.readouterr().out == to_text(render_brief(asked.answer), width=80)


def test_brief_loses_nothing_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", "--brief", "--model", "llama3.2-1b", "--telemetry"])
    assert "How busy each part is" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--json"], ["--program", str(ROOT / "docs" / "examples" / "step.json.gz")]])
def test_brief_is_refused_where_there_is_no_such_report(flags: list[str]) -> None:
    assert main(["predict", "--brief", *flags]) == 2


def test_help_says_what_each_flag_of_a_plan_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for said in (
        "--tp INTEGER Tensor-parallel degree. [1]",
        "--zero INTEGER What is sharded over `dp_shard`. [3]",  # of what stands behind the colon not "nothing" alone
        "Bytes of a bucket. [25.0 MiB]",
        "`tp` splits the embedding and the LM head too, by vocabulary. [true]",
    ):
        assert said in text
