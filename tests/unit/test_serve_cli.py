"""`shardwise serve` on the command line: files, flags, traces, and how faults are told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from simulator.base.errors import InputError, TableError
from simulator.base.exit_codes import ExitCode
from simulator.base.kernels import Gemm
from simulator.cli import main
from simulator.formats.readers.arrivals_table import read_arrivals
from simulator.formats.study.serving import read_serving_study
from simulator.spec.cluster.device import Device
from simulator.spec.software.stack import Stack
from simulator.studies.serving.kernels import NarrowWeights, multiplied, stored_as


def test_a_study_and_flags_over_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "day.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n100.5,30,4\n101,300,20\n\n101.5,7,1\n")
    study = tmp_path / "study.toml"
    study.write_text(
        'model = "llama3.2-1b"\ncluster = "hgx-h100-8"\n[inference]\ntp = 1\ndp = 2\n'
        '[workload]\ntrace = "day.csv"\nwarmup = 0.0\n[slo]\nttft = "1s"\n'
    )
    assert main(["serve", str(study), "--tp", "2", "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert told["num_devices"] == 4
    assert told["num_requests"] == 3
    assert told["load"]["arriving_per_s"] == 2.0
    assert told["attainments"][0]["share"] == 1.0
    assert told["memory"]["used_bytes"] <= told["memory"]["capacity_bytes"]
    assert {s["what"]: s["kind"] for s in told["sources"]}["inference"] == "given"


def test_a_person_reads_verdict_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "serve",
        "--model",
        "llama3.2-1b",
        "--requests",
        "50",
        "--slo-ttft",
        "1s",
        "--slo-latency",
        "1ms",
        "--plain",
    ]
    assert main(arguments) == ExitCode.OK
    told = capsys.readouterr().out
    for part in ("OK  llama3.2-1b", "time to first token", "p99 is above", "blocks of 16", "seed = 0", "assumed"):
        assert part in told


def test_brief_is_one_screen_of_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", "--model", "llama3.2-1b", "--requests", "50", "--slo-ttft", "1ms", "--plain"]
    assert main(arguments) == ExitCode.OK
    whole = capsys.readouterr().out.splitlines()
    assert main([*arguments, "--brief"]) == ExitCode.OK
    brief = capsys.readouterr().out.splitlines()
    assert len(brief) <= 24
    assert max(map(len, brief)) <= 80
    told = [line.split() for line in whole]
    for name in ("OK  llama3.2-1b", "  time to first token", "  ttft", "  cache   ", "  used"):
        assert next(line.split() for line in brief if line.startswith(name)) in told
    assert main([*arguments, "--brief", "--json"]) == ExitCode.USAGE
    assert "--brief and --json are two answers" in capsys.readouterr().err


def test_what_does_not_fit_has_its_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "llama3-405b", "--plain"]) == ExitCode.DOES_NOT_FIT
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_gpus_that_serve_nothing_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    line = "serve --model llama3-8b --gpus 4xh100 --rate 1 --requests 3 --prompt 16 --output 4"
    assert main(line.split()) == 0
    assert "1 of the 4 GPUs serve" in " ".join(capsys.readouterr().out.split())
    assert main([*line.split(), "--tp", "4"]) == 0
    assert "GPUs serve" not in capsys.readouterr().out


def test_faults_name_their_flags(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--weights",
        "int3",
        "--rate",
        "-1",
        "--prompt",
        "many",
        "--slo-ttft",
        "5",
        "--model",
        "nope",
        "--set",
        "inference.wheels=4",
    ]
    assert main(["serve", *arguments]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    for part in (
        "--weights",
        "--rate",
        "--prompt",
        "--slo-ttft: must be a time with its unit; it is 5",
        "--model: no preset is called 'nope'",
        "wheels",
    ):
        assert part in told


def test_an_unknown_stack_is_one_fault_with_the_stacks_of_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--stack", "nonsense"]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    engines = [stack.name for stack in map(Stack.load, Stack.names()) if stack.engine is not None]
    assert told.count("nonsense") == 1
    assert all(name in told for name in engines)


def test_a_trace_and_drawn_requests_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    assert main(["serve", "--trace", str(trace), "--rate", "3"]) == ExitCode.BAD_INPUT
    assert "rate" in capsys.readouterr().err
    assert main(["serve", "--trace", str(trace), "--json"]) == ExitCode.OK


def test_every_fault_of_a_trace_is_told_by_line(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n1,10,20\n0.5,10,3\n\n3,x,0\n4,5\n-1,2,3\nnan,2,3\n")
    with pytest.raises(TableError) as caught:
        read_arrivals(trace)
    told = [str(fault) for fault in caught.value.faults]
    lines = [3, 5, 5, 6, 7, 8]
    assert len(told) == len(lines)
    assert all(f"line {line}:" in text for line, text in zip(lines, told, strict=True))


def test_what_an_overloaded_server_is_told_to_do_can_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    """More engines than the cluster's GPUs take more nodes, which the advice names."""
    asked = ["serve", "--model", "llama3.2-1b", "--cluster", "hgx-h100-8", "--rate", "2000", "--requests", "100"]
    assert main([*asked, "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "overloaded"
    advice = dict(part.split(" = ") for part in re.findall(r"(?:dp|nodes) = \d+", told["suggestion"]))
    assert int(advice["dp"]) > 8
    followed = [*asked, *(word for name, number in advice.items() for word in (f"--{name}", number)), "--json"]
    assert main(followed) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["verdict"] != "overloaded"


def test_users_whose_answers_are_equally_long_are_said_to_stay_in_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Which is what makes them wait; answers of several lengths, or users who think, do not."""
    asked = ["serve", "--model", "llama3.2-1b", "--concurrency", "4", "--requests", "80", "--prompt", "100", "--json"]
    told = {}
    for name, more in (
        ("alike", ["--output", "20"]),
        ("varied", ["--output", '{ distribution = "uniform", low = 10, high = 30 }']),
        ("thinking", ["--output", "20", "--turn-gap-s", "1s"]),
    ):
        assert main([*asked, *more]) == ExitCode.OK
        told[name] = "stay in step" in json.loads(capsys.readouterr().out)["suggestion"]
    assert told == {"alike": True, "varied": False, "thinking": False}


def test_traces_of_chat_services_are_read_as_they_were_published(tmp_path: Path) -> None:
    """Dates, other names of the columns, and columns that a request has no use for."""
    trace = tmp_path / "t.csv"
    dates = ("2023-12-31 23:59:59.7500000", "2024-01-01T02:00:00.5+02:00")
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{dates[0]},374,44\n{dates[1]},396,109\n")
    told = [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in read_arrivals(trace)]
    assert told == [(0.0, 374, 44), (0.75, 396, 109)]
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens"
    trace.write_text(f"{header}\n5,a chat,472,18,490\n45.5,another,1087,230,1317\n")
    told = [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in read_arrivals(trace)]
    assert told == [(0.0, 472, 18), (40.5, 1087, 230)]


@pytest.mark.parametrize("date", ["2023-13-01 00:00:00", "2023-01-01", "2023-01-01 24:61:00", "01/02/2023 10:00"])
def test_dates_that_are_none_are_refused(tmp_path: Path, date: str) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(f"timestamp,prompt_tokens,output_tokens\n{date},374,44\n")
    with pytest.raises(TableError, match=r"line 2: arrival_s: .* is not a time"):
        read_arrivals(trace)


@pytest.mark.parametrize("text", ["", "arrival_s,prompt_tokens\n1,2\n", "arrival_s,prompt_tokens,output_tokens\n"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(text)
    with pytest.raises(TableError):
        read_arrivals(trace)


def test_the_highest_rate_within_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "serve",
        "--model",
        "llama3.2-1b",
        "--requests",
        "150",
        "--highest-rate",
        "--slo-tpot",
        "3ms",
        "--json",
    ]
    assert main(arguments) == ExitCode.OK
    heard = capsys.readouterr()
    told = json.loads(heard.out)
    assert told["attainments"][0]["held"]
    rates = [float(line.split()[0]) for line in heard.err.splitlines() if line.endswith((": within", ": above"))]
    kept = [line.endswith("within") for line in heard.err.splitlines() if line.endswith((": within", ": above"))]
    assert len(rates) == 7
    best = max(rate for rate, held in zip(rates, kept, strict=True) if held)
    rate = next(s["detail"] for s in told["sources"] if "--highest-rate" in s["detail"])
    assert float(rate.split()[2]) == pytest.approx(best, rel=0.01)
    assert min(r for r, held in zip(rates, kept, strict=True) if not held) > best
    assert main(["serve", "--highest-rate"]) == ExitCode.BAD_INPUT
    assert "--slo-ttft" in capsys.readouterr().err


def test_tokens_cost_what_the_devices_cost_while_they_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(
        'currency = "USD"\n[[price]]\ncluster = "hgx-h100-8"\nkind = "reserved"\nper_gpu_hour = 3.6\n'
        'date = "2026-11-01"\nsource = "made up"\n'
    )
    arguments = ["serve", "--model", "llama3.2-1b", "--tp", "2", "--requests", "40", "--prices", str(prices)]
    assert main([*arguments, "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    load, (cost,) = told["load"], told["costs"]
    second = 2 * 3.6 / 3600  # two devices
    assert cost["million_output_tokens"] == pytest.approx(second / load["output_tokens_per_s"] * 1e6)
    assert cost["request"] == pytest.approx(second / load["requests_per_s"])
    full = load["capacity_per_s"] * 128  # tokens a second
    assert cost["million_output_tokens_at_capacity"] == pytest.approx(second / full * 1e6)
    assert cost["low_at_capacity"] < cost["million_output_tokens_at_capacity"] < cost["high_at_capacity"]
    assert main([*arguments, "--plain"]) == ExitCode.OK
    assert "reserved, 3.60 USD a GPU and hour" in capsys.readouterr().out
    assert main([*arguments, "--cluster", "dgx-a100-80-8"]) == ExitCode.BAD_INPUT
    assert "no price of dgx-a100-80-8" in capsys.readouterr().err


def test_a_window_that_no_answer_ends_in_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for rate, there in (("500", True), ("1", False)):
        assert main(["serve", "--rate", rate, "--requests", "40", "--output", "60", "--plain"]) == ExitCode.OK
        assert ("none is answered before the last comes" in capsys.readouterr().out) == there


@pytest.mark.parametrize("requests", ["1", "2", "5", "20"])
@pytest.mark.parametrize("more", [[], ["--warmup", "0"], ["--rate", "0"], ["--rate", "30"], ["--output", "1"]])
def test_a_few_requests_are_answered_with_or_without_a_cost(
    requests: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a few, none may end in the measured time: then there is no cost a request, and the answer says so."""
    prices = tmp_path / "prices.toml"
    price = 'cluster = "hgx-h100-8"\nkind = "on-demand"\nper_gpu_hour = 2.5\ndate = "2026-01-01"\nsource = "made up"\n'
    prices.write_text(f'currency = "USD"\n[[price]]\n{price}')
    small = ("--model", "llama3.2-1b", "--requests", requests, "--prices", str(prices), "--json")
    assert main(["serve", *small, *more]) == ExitCode.OK
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert bool(answer["costs"]) == (answer["load"]["requests_per_s"] > 0) == ("none has a cost" not in err)


def test_a_key_without_its_table_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--set", "max_model_len=4096", "--set", "turns=3"]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "did you mean inference.max_model_len?" in told
    assert "did you mean workload.turns?" in told


def test_a_closed_loop_has_no_rate_and_is_never_overloaded(capsys: pytest.CaptureFixture[str]) -> None:
    loop = ["serve", "--concurrency", "8", "--requests", "40", "--model", "llama3.2-1b"]
    assert main([*loop, "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "ok"
    assert 4 < told["load"]["in_system"] <= 8
    assert main([*loop, "--rate", "3"]) == ExitCode.BAD_INPUT
    assert "concurrency" in capsys.readouterr().err


def test_users_of_a_closed_loop_may_come_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    """Of eight within 8 s each finds an idle server; all at once they wait for each other's prompts."""
    loop = ["serve", "--concurrency", "8", "--requests", "8", "--model", "llama3.2-1b", "--warmup", "0", "--json"]
    found = []
    for more in ([], ["--ramp-s", "8s"]):
        assert main([*loop, *more]) == ExitCode.OK
        found.append(json.loads(capsys.readouterr().out)["latencies"]["ttft"])
    assert found[1]["p50_s"] == pytest.approx(found[1]["max_s"])
    assert found[1]["max_s"] < found[0]["p50_s"]
    assert main(["serve", "--rate", "3", "--ramp-s", "8s"]) == ExitCode.BAD_INPUT
    assert "give concurrency" in capsys.readouterr().err


def test_a_step_too_small_for_whole_prompts_is_no_longer_made_larger_in_silence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["--chunked-prefill", "false", "--max-batched-tokens", "1024", "--max-model-len", "4000"]
    assert main(["serve", *small]) == ExitCode.BAD_INPUT
    assert "a whole prompt may have max_model_len = 4000 (max_batched_tokens = 4000" in capsys.readouterr().err


def test_of_a_queue_that_grows_without_end_only_the_first_requests_are_watched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("simulator.studies.serving.serving._WATCHED", 60)
    assert main(["serve", "--requests", "400", "--rate", "1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["num_requests"]) == ("overloaded", 60)
    assert main(["serve", "--requests", "100", "--rate", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_requests"] == 100


def test_contradictory_settings_of_an_engine_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--block-size", "9000", "--max-batched-tokens", "100", "--chunked-prefill", "false", "--replicate", "head"]
    assert main(["serve", *words]) == 3
    said = capsys.readouterr().err
    for key in ("block_size: blocks of 9000", "a whole prompt may have", "100 tokens a step for", "replicate"):
        assert key in said


@pytest.mark.parametrize(
    ("model", "given", "weights"),
    [
        ("openai/gpt-oss-120b", {}, "mxfp4"),
        ("unsloth/gpt-oss-120b-BF16", {}, "bf16"),
        ("deepseek-ai/DeepSeek-R1", {}, "fp8"),
        ("nvidia/DeepSeek-R1-FP4", {}, "nvfp4"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", {}, "bf16"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", {}, "int8"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", {}, "int4"),
        ("Qwen/Qwen3-32B-FP8", {"inference.weights": "bf16"}, "bf16"),
    ],
)
def test_weights_are_those_of_the_checkpoint_that_is_named(model: str, given: dict[str, str], weights: str) -> None:
    study = read_serving_study(None, {"model": model}, given, (), searched=True)
    assert study.plan.weights == weights
    said = any("as the checkpoint of" in source.detail for source in study.sources)
    assert said == (not given and weights != "bf16")


@pytest.mark.parametrize(
    ("said", "weights"),
    [
        (None, "bf16"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
        ({"quant_method": ["odd"], "bits": [4], "config_groups": 3}, "bf16"),
    ],
)
def test_weights_are_what_a_config_says_of_its_checkpoint(tmp_path: Path, said: object, weights: str) -> None:
    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 512,
    }
    config = {"model_type": "llama", **sizes, "quantization_config": said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        assert read_serving_study(None, {"model": str(path)}, {}, (), searched=True).plan.weights == weights


@pytest.mark.parametrize(
    ("text", "stack"),
    [
        ("sglang", "sglang-2025"),
        ("vLLM 0.6.3", "vllm-2024"),
        ("vllm==0.9.2", "vllm-2025"),
        ("trtllm", "tensorrt-llm-2025"),
    ],
)
def test_a_stack_may_be_named_as_its_engine_is(text: str, stack: str) -> None:
    assert read_serving_study(None, {}, {"inference.stack": text}, ()).plan.stack == stack


def test_no_users_of_a_closed_loop_leave_the_rate_as_it_is() -> None:
    assert read_serving_study(None, {}, {"workload.concurrency": "0"}, ()).workload.rate == 4.0


def test_weights_in_fp8_are_widened_on_gpus_that_multiply_none_and_refused_where_no_kernel_is() -> None:
    """A product of one row reads its weights: half as many bytes as in 16 bits."""
    product = Gemm(m=1, n=8192, k=8192, dtype="bf16")
    (widened,) = stored_as((product,), "fp8", multiplied(Device.load("a100-sxm4-80gb")))
    assert isinstance(widened, NarrowWeights)
    assert widened.num_bytes == 8192 * 8192 + 2 * (8192 + 8192)
    with pytest.raises(InputError, match=r"no kernel for weights in fp8 on t4.*int4"):
        read_serving_study(None, {"cluster": "1xt4"}, {"inference.weights": "fp8"}, ())


def test_an_engine_of_whole_prompts_starts_and_refuses_longer_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """TensorRT-LLM by its defaults: 8,192 tokens a step, sequences as long as the model's, prompts in one piece."""
    asked = ["serve", "--model", "qwen3-8b", "--stack", "tensorrt-llm", "--requests", "4", "--json", "--prompt"]
    assert main([*asked, "8192"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["memory"]["longest_tokens"] == 32768
    assert main([*asked, "8193"]) == ExitCode.BAD_INPUT
    assert "a prompt has 8193 tokens, and a step computes whole ones, of 8192 tokens at most" in capsys.readouterr().err


def test_gpus_name_their_usual_machine_and_no_other_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--gpus", "1xl4", "--model", "qwen3-4b", "--requests", "4", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["cluster"] == "1xl4"
    assert main(["serve", "--gpus", "8xh100", "--cluster", "8xh100"]) == ExitCode.BAD_INPUT
    assert "--gpus: --cluster is given too" in capsys.readouterr().err


def test_where_no_single_change_makes_it_fit_shorter_sequences_are_tried_with_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--gpus", "1xt4", "--model", "llama3.1-8b", "--json"]) == ExitCode.DOES_NOT_FIT
    plans = [remedy["plan"] for remedy in json.loads(capsys.readouterr().out)["remedies"]]
    assert plans
    assert all(set(plan) == {"weights", "max_model_len"} for plan in plans)


@pytest.mark.parametrize(
    ("workload", "flags", "place"),
    [
        ("", {"workload.concurrency": "4", "workload.rate": "3"}, "--concurrency and --rate"),
        ("concurrency = 4", {"workload.rate": "3"}, "--rate"),
        ("concurrency = 4\nrate = 3.0", {"workload.seed": "1"}, "study.toml: workload"),
        ("", {"workload.ramp_s": "3s", "workload.seed": "1"}, "--ramp-s"),
    ],
)
def test_keys_that_contradict_each_other_are_told_at_the_flags_that_gave_them(
    tmp_path: Path, workload: str, flags: dict[str, str], place: str
) -> None:
    study = tmp_path / "study.toml"
    study.write_text(f'model = "llama3.2-1b"\ncluster = "hgx-h100-8"\n[workload]\n{workload}\n')
    with pytest.raises(InputError) as caught:
        read_serving_study(study, {}, flags, ())
    assert [fault.place.removeprefix(f"{tmp_path}/") for fault in caught.value.faults] == [place]
