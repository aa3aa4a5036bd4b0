"""`serve --export`: what each engine is told of a plan, what it cannot be told, and that nothing is written by halves."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from simulator.base.errors import PlanError
from simulator.cli import main
from simulator.formats.writers.serving_launch import launch_files
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving import InferencePlan, with_defaults

CLUSTER = Cluster.load("hgx-h100-8")
MODEL = Model.load("llama3-8b")


def files_of(stack: str, **plan: Any) -> dict[str, str]:
    found = Stack.load(stack)
    return launch_files(with_defaults(InferencePlan(stack=stack, **plan), found), MODEL, CLUSTER, found)


def commands(text: str) -> list[list[str]]:
    """The words of each engine's command."""
    return [shlex.split(line.split(" && ", 1)[1].rsplit(" & ", 1)[0]) for line in text.splitlines() if " && " in line]


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        ("vllm-2025", ("--tensor-parallel-size 2", "--max-num-batched-tokens 4096", "--max-num-seqs 64", "--max-model-len 8192")),
        ("sglang-2025", ("--tp-size 2", "--chunked-prefill-size 4096", "--max-running-requests 64", "--context-length 8192")),
        ("tensorrt-llm-2025", ("--tp_size 2", "--max_num_tokens 8192", "--max_batch_size 64", "--max_seq_len 8192")),
        ("tgi-2025", ("--num-shard 2", "--max-batch-prefill-tokens 8192", "--max-concurrent-requests 64", "--max-total-tokens 8192")),
    ],
)  # fmt: skip
def test_each_engine_is_told_the_plan(stack: str, words: tuple[str, ...]) -> None:
    files = files_of(stack, tp=2, dp=3, max_sequences=64, max_batched_tokens=8192 if stack[0] == "t" else 4096)
    assert subprocess.run(["bash", "-n"], input=files["launch.sh"], text=True, check=False).returncode == 0  # noqa: S607
    found = commands(files["launch.sh"])
    assert len(found) == 3
    assert all(word in " ".join(found[0]) for word in words)
    assert [one[0] for one in found] == [f"CUDA_VISIBLE_DEVICES={gpus}" for gpus in ("0,1", "2,3", "4,5")]
    ports = [re.search(r"--port (\d+)", " ".join(one)) for one in found]
    assert len({port[1] for port in ports if port}) == 3
    deployment = next(one for one in yaml.safe_load_all(files["kubernetes.yaml"]) if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert (deployment["spec"]["replicas"], container["resources"]["limits"]["nvidia.com/gpu"]) == (3, 2)
    assert all(word in " ".join(container["command"]) for word in words)


def test_pools_have_commands_and_deployments_of_their_own() -> None:
    files = files_of("sglang-2025", tp=4, prefill_tp=2, prefill_dp=2)
    modes = [one[one.index("--disaggregation-mode") + 1] for one in commands(files["launch.sh"])]
    assert modes == ["prefill", "prefill", "decode"]
    kinds = [
        one["metadata"]["name"] for one in yaml.safe_load_all(files["kubernetes.yaml"]) if one["kind"] == "Deployment"
    ]
    assert kinds == ["llama3-8b-prefill", "llama3-8b-decode"]


def test_engines_of_the_second_node_start_there() -> None:
    text = launch_files(
        InferencePlan(tp=4, dp=3), MODEL, Cluster.load("hgx-h100-8").with_nodes(2), Stack.load("vllm-2025")
    )
    assert re.findall(r'"\$NODE" = (\d)', text["launch.sh"]) == ["0", "0", "1"]


def test_all_that_an_engine_cannot_be_told_is_said_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        files_of("vllm-2025", tp=8, pp=2, mixed_steps=False, cache_of="free", replicate=("head",))
    places = {fault.place.removeprefix("inference: ") for fault in caught.value.faults}
    assert places == {"tp", "mixed_steps", "cache_of", "replicate"}


def test_an_engine_whose_launch_is_unknown_is_named() -> None:
    with pytest.raises(PlanError, match=r"lmdeploy-2024: describes no engine whose launch is known: vLLM, SGLang"):
        files_of("lmdeploy-2024")


def test_the_command_writes_only_what_fits_and_into_a_new_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, taken = tmp_path / "launch", tmp_path / "taken"
    assert main(["serve", "--requests", "5", "--export", str(folder)]) == 0
    assert {file.name for file in folder.iterdir()} == {"launch.sh", "kubernetes.yaml"}
    taken.mkdir()
    (taken / "mine").touch()
    assert main(["serve", "--requests", "5", "--export", str(taken)]) == 3
    assert "is not empty" in capsys.readouterr().err
    assert main(["serve", "--requests", "5", "--model", "llama3-70b", "--export", str(tmp_path / "new")]) == 4
    assert not (tmp_path / "new").exists()


def test_what_a_launcher_has_not_is_told_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        files_of("tgi-2025", pp=2, speculative="mtp", acceptance=0.5)
    assert [fault.place for fault in caught.value.faults] == ["inference: pp", "inference: speculative"]


def test_a_search_writes_its_best_plan(tmp_path: Path) -> None:
    folder = tmp_path / "best"
    words = ["--search", "--rate", "4", "--slo-tpot", "p95=50ms", "--fix", "tp=1,2", "--fix", "pp=1"]
    assert (
        main(["serve", *words, "--disaggregated", "no", "--requests", "50", "--jobs", "1", "--export", str(folder)])
        == 0
    )
    assert "--tensor-parallel-size 1" in (folder / "launch.sh").read_text()


def test_guesses_and_attention_of_each_gpu_are_told() -> None:
    guessed = files_of("vllm-2025", speculative="ngram", draft_tokens=4, acceptance=0.5)["launch.sh"]
    words = commands(guessed)[0]
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
    }
    with pytest.raises(PlanError, match="a checkpoint of its own"):
        files_of("sglang-2025", speculative="draft", draft_model="llama3.2-1b", acceptance=0.5)
    with pytest.raises(PlanError, match="a checkpoint of its own"):
        files_of("vllm-2025", speculative="eagle", acceptance=0.5)
    flag = "--disable-hybrid-kv-cache-manager"
    for said, given in (({}, False), ({"window_cache": False}, True), ({"prefill_dp": 1}, False)):
        assert (flag in files_of("vllm-2025", **said)["launch.sh"]) == given
    with pytest.raises(PlanError, match="connector to other memory"):
        files_of("vllm-2025", prefix_store="host")
    stack, model = Stack.load("sglang-2025"), Model.load("qwen3-30b-a3b")
    plan = with_defaults(InferencePlan(stack="sglang-2025", tp=4, experts="dealt", attention_dp=True), stack)
    text = " ".join(commands(launch_files(plan, model, CLUSTER, stack)["launch.sh"])[0])
    assert "--tp-size 4" in text
    assert "--dp-size 4 --enable-dp-attention --moe-a2a-backend deepep --ep-size 4" in text


def test_room_for_windows_and_parts_of_a_cache_are_told() -> None:
    assert "--swa-full-tokens-ratio 0.8" in " ".join(commands(files_of("sglang-2025")["launch.sh"])[0])
    assert "--decode-context-parallel-size 2" in " ".join(commands(files_of("vllm-2026", tp=8, dcp=2)["launch.sh"])[0])
    assert "context-parallel" not in files_of("vllm-2026")["launch.sh"]
    with pytest.raises(PlanError, match="SGLang is not told of it"):
        files_of("sglang-2025", tp=8, dcp=2)


@pytest.mark.parametrize("stack", ["vllm-2025", "sglang-2025", "tgi-2025"])
def test_a_checkpoint_that_is_quantised_already_is_not_told_how(stack: str) -> None:
    """Engines read it in its config.json, and end where a flag says another method than that (compressed-tensors, modelopt)."""
    found = Stack.load(stack)
    plan = with_defaults(InferencePlan(stack=stack, weights="fp8"), found)
    for checkpoint, cast in ((None, True), ("bf16", True), ("fp8", False)):
        text = launch_files(plan, MODEL, CLUSTER, found, checkpoint=checkpoint)["launch.sh"]
        assert ("quanti" in " ".join(commands(text)[0])) == cast
        assert ("become fp8 as they are loaded" in text) == cast
        assert ("must be quantised already (fp8)." in text) == (not cast)


def test_the_model_s_name_says_that_its_checkpoint_is_quantised(tmp_path: Path) -> None:
    for name, cast in (("Qwen/Qwen3-8B-FP8", False), ("Qwen/Qwen3-8B", True)):
        folder = tmp_path / name
        words = ["--model", name, "--weights", "fp8", "--requests", "3", "--export", str(folder)]
        assert main(["serve", *words]) == 0
        assert ("--quantization fp8" in (folder / "launch.sh").read_text()) == cast
    assert "by ModelOpt" in files_of("tensorrt-llm-2025", weights="fp8")["launch.sh"]


def test_parts_of_prompts_are_told_to_engines_that_have_them() -> None:
    found, latents = Stack.load("vllm-2026"), Model.load("deepseek-v3")
    for model, degrees in (
        (latents, {"tp": 4, "pcp": 2}),
        (latents, {"prefill_dp": 1, "prefill_tp": 2, "prefill_pcp": 2}),
    ):
        plan = with_defaults(InferencePlan(stack=found.name, **degrees), found)
        text = launch_files(plan, model, CLUSTER, found)["launch.sh"]
        told = ["--prefill-context-parallel-size 2" in " ".join(one) for one in commands(text)]
        assert told == ([True] if "pcp" in degrees else [True, False])
    with pytest.raises(PlanError, match="latents"):
        files_of("vllm-2026", tp=4, pcp=2)
    with pytest.raises(PlanError, match="pcp: SGLang is not told of it"):
        files_of("sglang-2025", tp=4, pcp=2)


def test_a_pool_of_states_is_told_where_it_is_not_the_engine_s_own() -> None:
    flag = "--mamba-full-memory-ratio"
    assert flag not in files_of("sglang-2025")["launch.sh"]
    assert f"{flag} 2.0" in files_of("sglang-2025", state_part=2.0)["launch.sh"]
