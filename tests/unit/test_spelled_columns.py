"""Tables of runs from strangers: columns under other names, results in columns of their own, units that are stated or asked for."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from simulator.base.errors import ClusterError, TableError
from simulator.formats.readers.measured_table import read_measured
from simulator.formats.readers.runs_table import COLUMNS
from simulator.formats.readers.spelled_columns import advice, names, own_names, plain
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.studies import backtest
from simulator.studies.backtest.evaluate import evaluate_row
from simulator.studies.backtest.measured import step_seconds
from simulator.studies.backtest.report import BacktestReport
from simulator.studies.backtest.resolve import resolve
from simulator.studies.backtest.rows import BadRow, RunRow, Table
from simulator.studies.backtest.text import render

HEADER = "Model,GPU,# GPUs,Seq Len,MBS,GBS,Precision"
CELLS = "Llama-3-8B,H100 SXM,8,4096,1,64,BF16"


def read(tmp_path: Path, header: str, *lines: str) -> Table:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join((header, *lines, "")))
    return read_measured(path)


def row(tmp_path: Path, header: str, line: str) -> RunRow:
    (found,) = read(tmp_path, header, line).rows
    assert isinstance(found, RunRow), found
    return found


@pytest.mark.parametrize(
    ("column", "cell", "metric", "value"),
    [
        ("Tokens/s/GPU", "9000", "tokens_per_s_per_gpu", 9000),
        ("tokens_per_sec_per_gpu", "9000", "tokens_per_s_per_gpu", 9000),
        ("TGS", "9000", "tokens_per_s_per_gpu", 9000),
        ("tokens/s", "72000", "tokens_per_s", 72000),
        ("kTokens / s", "72", "tokens_per_s", 72000),
        ("Samples/s", "17.5", "samples_per_s", 17.5),
        ("Step time (s)", "3.5", "step_time_s", 3.5),
        ("step_time_ms", "3500", "step_time_s", 3.5),
        ("elapsed time per iteration (ms)", "3500", "step_time_s", 3.5),
        ("TFLOP/s/GPU", "450", "model_tflops_per_gpu", 450),
        ("TFLOPS/GPU", "450", "model_tflops_per_gpu", 450),
        ("MFU (%)", "45.5%", "mfu", 0.455),
        ("mfu_fraction", "0.455", "mfu", 0.455),
    ],
)
def test_a_result_says_its_metric_and_unit_in_its_name(
    tmp_path: Path, column: str, cell: str, metric: str, value: float
) -> None:
    found = row(tmp_path, f"{HEADER},{column}", f"{CELLS},{cell}")
    assert (found.metric, found.value) == (metric, pytest.approx(value))


@pytest.mark.parametrize("column", ["MFU", "step time", "throughput", "TFLOPS", "tps", "speed"])
def test_a_unit_is_asked_for_and_never_guessed(tmp_path: Path, column: str) -> None:
    with pytest.raises(TableError) as caught:
        read(tmp_path, f"{HEADER},{column}", f"{CELLS},0.4")
    (fault,) = caught.value.faults
    assert str(fault).startswith(
        f"{tmp_path / 'runs.csv'}: header: unknown column {column!r} ({names()['open'][plain(column)]}"
    )


def test_what_is_left_out_beside_a_result_is_named_with_what_would_be_right(tmp_path: Path) -> None:
    table = read(tmp_path, f"{HEADER},tokens/s/GPU,MFU,batch_size", f"{CELLS},9000,45,8")
    assert table.unread == (
        "'MFU': mfu_percent or mfu_fraction",
        "'batch_size': micro_batch (of a GPU and forward) or global_batch (of a step)",
    )


def test_columns_are_known_by_other_names(tmp_path: Path) -> None:
    found = row(
        tmp_path,
        "run_id,Software,num_layers,hidden_size,num_attention_heads,intermediate_size,activation,vocab_size,seq_length,accelerator,"
        "world_size,tensor_model_parallel_size,dtype,per_device_train_batch_size,global_batch_size,Sequence Parallel,s/step",
        "a,ours,2,64,4,256,GELU,100,128,H100,8,2,bf16-mixed,1,8,Yes,0.5",
    )
    assert (found.id, found.framework, found.n_layers, found.d_model, found.n_heads, found.d_ff) == ("a", "ours", 2, 64, 4, 256)  # fmt: skip
    assert (found.mlp_kind, found.vocab, found.seq_len, found.gpu, found.n_gpus, found.tp) == ("gelu", 100, 128, "H100", 8, 2)  # fmt: skip
    assert (found.precision, found.micro_batch, found.global_batch, found.seq_parallel) == ("bf16", 1, 8, "y")


def test_counts_follow_from_nodes_and_accumulation(tmp_path: Path) -> None:
    header = "model,gpu,nodes,gpus per node,tp,seq,mbs,grad_accum,ZeRO stage,step_time_s"
    found = row(tmp_path, header, "llama2-7b,A100-80GB,4,8,2,4096,2,3,3,9")
    assert (found.n_gpus, found.global_batch, found.zero_or_fsdp) == (32, 2 * 3 * 32 // 2, "zero3")


def test_a_run_out_of_memory_is_one(tmp_path: Path) -> None:
    found = row(tmp_path, f"{HEADER},tokens/s,Peak memory (GB)", f"{CELLS},OOM,-")
    assert (found.metric, found.mem_metric, found.mem_value) == (None, "oom", None)


def test_memory_keeps_its_unit(tmp_path: Path) -> None:
    allocated = row(tmp_path, f"{HEADER},max_memory_allocated (GB)", f"{CELLS},40")
    assert (allocated.mem_metric, allocated.mem_value) == ("peak_allocated_gib", pytest.approx(40e9 / 2**30))
    unsaid = row(tmp_path, f"{HEADER},GPU memory (GiB)", f"{CELLS},40")
    assert (unsaid.mem_metric, unsaid.mem_value) == ("gpu_memory_gb", pytest.approx(40 * 2**30 / 1e9))


def test_an_mfu_is_of_the_dense_peak_in_the_precision_of_the_run(tmp_path: Path) -> None:
    run = resolve(row(tmp_path, f"{HEADER},mfu_fraction", f"{CELLS},0.5"))
    tokens, model = 64 * 4096, run.model
    flop = tokens * (6 * model.num_matmul_parameters + 12 * model.num_layers * model.num_heads * model.head_dim * 4096)
    peak = Device.load("h100-sxm5-80gb").peak("bf16")
    assert step_seconds(run.row, 8, "full_attention", model) == pytest.approx(flop / (0.5 * peak * 8))
    (bad,) = read(tmp_path, f"{HEADER},mfu_fraction", f"{CELLS},50").rows
    assert isinstance(bad, BadRow)
    assert "an MFU above 1 (a fraction, or the column mfu_percent)" in str(bad.faults[0])


def test_a_public_name_brings_the_sizes_and_an_instance_its_gpu(tmp_path: Path) -> None:
    found = row(
        tmp_path,
        "model,instance,nodes,gpus_per_node,seq,mbs,gbs,step_time_s",
        "meta-llama/Llama-2-7b-hf,p4d.24xlarge,2,8,2048,1,32,3",
    )
    run = resolve(found)
    assert (run.model.num_layers, run.cluster.device.name, run.cluster.num_nodes) == (32, "a100-sxm4-40gb", 2)


def test_an_unknown_model_is_named_with_the_nearest(tmp_path: Path) -> None:
    header = "model,gpu,n_gpus,seq,mbs,gbs,step_time_s"
    outcome = evaluate_row(row(tmp_path, header, "lama3-8b,H100,8,2048,1,32,3"))
    assert outcome.status == "refused"
    assert "no preset is called 'lama3-8b' (did you mean llama3-8b" in outcome.reason


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("GPT-3 (175B)", "gpt3-175b"),
        ("Llama 2 [7B]", "llama2-7b"),
        ("Turing-NLG 530B", "gpt-530b"),
        ("TinyLlama", "tinyllama-1.1b"),
    ],
)
def test_names_of_models_as_papers_write_them(tmp_path: Path, name: str, preset: str) -> None:
    found = resolve(row(tmp_path, "model,gpu,n_gpus,seq,mbs,gbs,step_time_s", f"{name},H100,512,1024,1,512,3")).model
    known = Model.load(preset)
    assert (found.num_layers, found.d_model, found.num_heads) == (known.num_layers, known.d_model, known.num_heads)


def test_what_would_be_right_for_an_unknown_model_is_what_a_table_can_say(tmp_path: Path) -> None:
    """A table has no column for the path of a model's file, which other commands take."""
    header = "model,gpu,n_gpus,seq,mbs,gbs,step_time_s"
    outcome = evaluate_row(row(tmp_path, header, "palm-8b,H100,8,2048,1,32,3"))
    assert outcome.reason is not None
    assert "the sizes in their columns" in outcome.reason
    assert "the path of" not in outcome.reason


_OWN_DEVICE = """
name = "own-8"
gpus_per_node = 8
device = {name = "Own1", architecture = "hopper", memory_bytes = "96GB", memory_bytes_per_s = "2.4TB/s", num_sms = 100, \
power_w = 600, peak_flop_per_s = {fp32 = "50TFLOP/s", bf16 = "400TFLOP/s"}}
[intra]
kind = "nvlink4"
shape = "switch"
bytes_per_s = "262GB/s"
[host]
kind = "pcie4"
bytes_per_s = "31GB/s"
"""


def test_a_device_that_nobody_knows_comes_by_a_cluster_file(tmp_path: Path) -> None:
    """Its own peak is the one that an MFU is of."""
    machine = tmp_path / "own.toml"
    machine.write_text(_OWN_DEVICE)
    header = "model,machine,n_gpus,seq,mbs,gbs,mfu_percent"
    outcome = evaluate_row(row(tmp_path, header, f"llama2-7b,{machine},8,4096,1,8,40"))
    assert (outcome.status, outcome.reason) == ("ok", None)
    run = resolve(row(tmp_path, header, f"llama2-7b,{machine},8,4096,1,8,40"))
    flop = 8 * 4096 * (6 * run.model.num_matmul_parameters + 12 * 32 * 4096 * 4096)
    assert outcome.measured_step_s == pytest.approx(flop / (0.4 * 400e12 * 8))


@pytest.mark.parametrize(
    ("framework", "stack", "described"),
    [
        ("TRL SFTTrainer", "transformers-2024", True),
        ("veScale", "torch-2.4-eager", False),
        ("", "torch-2.4-eager", False),
    ],
)
def test_the_answer_says_which_software_it_assumed(
    tmp_path: Path, framework: str, stack: str, *, described: bool
) -> None:
    header = "framework,model,gpu,n_gpus,seq,mbs,gbs,step_time_s"
    report = backtest.run(read(tmp_path, header, f"{framework},llama2-7b,H100,8,2048,1,8,3"))
    (one,) = report.outcomes
    assert (one.stack, one.described) == (stack, described)
    assert report.as_json()["rows"][0]["stack"] == stack
    shown = _shown(report)
    assert f"{framework or 'not stated'}: {stack}" in shown
    assert ("no stack describes it" in shown) == (framework == "veScale")


@pytest.mark.parametrize(
    ("column", "cell", "ours", "value", "settings"),
    [
        ("recompute", "yes", "act_ckpt", "full", ()),
        ("recompute", "✗", "act_ckpt", "none", ()),
        ("recompute", "every_k", "act_ckpt", "", (("plan.recompute", "every_k"),)),
        ("recompute", "selective", "act_ckpt", "", (("plan.recompute", "selective"),)),
        ("sequence_parallel", "on", "seq_parallel", "y", ()),
        ("sequence_parallel", "true", "seq_parallel", None, (("plan.sequence_parallel", True),)),
        ("sharding_strategy", "DeepSpeed ZeRO-3", "zero_or_fsdp", "zero3", ()),
        ("experts", "8", "n_experts", 8, ()),
        ("zero", "stage 2", "zero_or_fsdp", "zero2", ()),
    ],
)
def test_a_column_that_is_a_plan_s_key_too_is_read_as_people_fill_it(
    tmp_path: Path, column: str, cell: str, ours: str, value: object, settings: tuple[tuple[str, object], ...]
) -> None:
    """As the plan takes it, where it does."""
    found = row(tmp_path, f"{HEADER},{column},step_time_s", f"{CELLS},{cell},3")
    assert (getattr(found, ours), found.settings) == (value, settings)


def test_a_refusal_says_why_beside_its_kind(tmp_path: Path) -> None:
    header = "model,gpu,n_gpus,seq,mbs,gbs,step_time_s"
    report = backtest.run(read(tmp_path, header, "llama2-7b,Gaudi2,8,2048,1,8,3", "llama2-7b,TPU v5e,8,2048,1,8,3"))
    assert "2  cluster refused (line 2: device: 'Gaudi2' is no GPU" in _shown(report)


def test_a_bad_line_without_an_id_is_named_once(tmp_path: Path) -> None:
    report = backtest.run(read(tmp_path, f"{HEADER},step_time_s", f"{CELLS},x", f"{CELLS},"))
    assert "line 2: bad: step_time_s: 'x' is not" in _shown(report)
    assert "line 3: bad: metric: nothing was measured" in _shown(report)


def _shown(report: BacktestReport) -> str:
    console = Console(width=400, file=io.StringIO())
    console.print(render(report))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("column", "own"),
    [
        ("Chip", "gpu"),
        ("# Chips", "n_gpus"),
        ("Chips per host", "gpus_per_node"),
        ("Run name", "id"),
        ("Remat", "act_ckpt"),
        ("attn_impl", "flash_attn"),
        ("Framework (version)", "framework"),
    ],
)
def test_columns_as_programs_for_other_chips_call_them(column: str, own: str) -> None:
    assert own_names([column], COLUMNS) == [own]


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ("Days to train", "step_time_s"),
        ("GPU hours", "step_time_s"),
        ("HFU (%)", "mfu_percent"),
        ("Params (B)", "model_name"),
    ],
)
def test_a_column_that_says_too_little_is_told_what_would_be_right(column: str, says: str) -> None:
    assert says in (advice(column) or "")


@pytest.mark.parametrize("sign", [";", "\t"])
def test_a_table_with_other_separators_is_told_so(tmp_path: Path, sign: str) -> None:
    with pytest.raises(TableError, match="commas between columns"):
        read(tmp_path, sign.join(HEADER.split(",")), sign.join(CELLS.split(",")))


def test_two_spellings_of_a_column_are_refused_but_beside_our_own_name_one_is_left_out(tmp_path: Path) -> None:
    both = read(tmp_path, f"{HEADER.replace('# GPUs', 'n_gpus')},world_size,tokens/s", f"{CELLS},9,5")
    assert both.unread == ("'world_size'",)
    with pytest.raises(TableError, match="'n_gpus' appears 2 times"):
        read(tmp_path, f"{HEADER},world_size,tokens/s", f"{CELLS},8,5")


def test_every_name_in_the_file_is_plain_and_means_one_thing() -> None:
    tables = [names()[kind] for kind in ("column", "result", "memory", "open")]
    every = [name for table in tables for name in table]
    assert [name for name in every if plain(name) != name] == []
    assert len(set(every)) == len(every)


@pytest.mark.parametrize(
    "name",
    [
        "TPU v5e",
        "v6e",
        "Gaudi2",
        "trn1.32xlarge",
        "Trainium2",
        "Ascend 910B",
        "v5litepod-256",
        "v5p-128",
        "Hygon DCU K100",
        "Kunlun P800",
        "MLU370",
        "MTT S4000",
        "Apple M2 Ultra",
        "Intel Max 1550",
    ],
)
def test_accelerators_that_are_no_gpus_are_named(name: str) -> None:
    with pytest.raises(ClusterError, match="is no GPU: accelerators of other kinds are not modelled"):
        Device.resolve(name)


@pytest.mark.parametrize(("column", "cell"), [("mfu_fraction", "0.5%"), ("step_time_s", "3.5%")])
def test_a_sign_of_per_cent_stands_only_behind_per_cent(tmp_path: Path, column: str, cell: str) -> None:
    (bad,) = read(tmp_path, f"{HEADER},{column}", f"{CELLS},{cell}").rows
    assert not isinstance(bad, RunRow)
    assert "a decimal number without separators" in str(bad.faults[0])


@pytest.mark.parametrize("cell", ["1e308", "1e-308", "9" * 30 + "e99"])
def test_what_nobody_measures_is_no_number(tmp_path: Path, cell: str) -> None:
    """Bytes of 1e308 GiB are no number of Python's."""
    (bad,) = read(tmp_path, f"{HEADER},step_time_s,peak_allocated_gib", f"{CELLS},1,{cell}").rows
    assert isinstance(bad, BadRow)
    assert "is not from 1e-30 to 1e+30" in str(bad.faults[0])


def test_a_plans_own_word_for_the_micro_batch_is_its_column() -> None:
    assert own_names(["gpu", "micro_batch_size", "reduce_dtype"], COLUMNS) == ["gpu", "micro_batch", "reduce_dtype"]
    assert own_names(["micro_batch", "micro_batch_size"], COLUMNS) == ["micro_batch", "micro_batch_size"]
