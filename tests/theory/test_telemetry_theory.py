"""How busy a step keeps each part, against the bytes of the collectives' own formulas and ZeRO's table."""

from __future__ import annotations

import gzip
import json
import math
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from simulator import Calibration, Cluster, Model, Plan, Prediction, predict
from simulator.cli import main
from simulator.play.lower import lower
from simulator.predict.rank_work import RankWork, rank_works
from simulator.predict.telemetry import Telemetry, step_percentiles, telemetry
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.software.stack import Stack
from simulator.work.program import Collective

LLAMA = Model.load("llama3.2-1b")


def told(plan: Plan, name: str = "dgx-a100-80-8") -> tuple[Prediction, Telemetry]:
    return _told(plan.model_dump_json(), name)


@cache
def _told(text: str, name: str) -> tuple[Prediction, Telemetry]:
    plan, cluster = Plan.model_validate_json(text), Cluster.load(name)
    prediction = predict(LLAMA, plan, cluster)
    return prediction, telemetry(prediction, LLAMA, plan, cluster)


def deepspeed(zero: int) -> Plan:
    return Plan(dp_shard=8, data_parallel="deepspeed", zero=zero, seq_len=1024)


def test_a_ring_sends_seven_eighths_of_each_gather_and_reduction() -> None:
    """arXiv 1910.02054, section 7.2: two all-gathers and one reduce-scatter; the root stays gathered for the backward."""
    plan = Plan(dp_shard=8, seq_len=1024)
    root = LLAMA.vocab_size * LLAMA.d_model + LLAMA.d_model  # tied embeddings, and the last norm
    layers = LLAMA.num_parameters - root
    gathered, reduced = 2 * (root + 2 * layers), 4 * LLAMA.num_parameters  # bf16; torch reduces in fp32
    sent = told(plan.copy_with(reduce_dtype="fp32"))[1].programs[0].of("nvlink").amount
    assert sent == pytest.approx(7 / 8 * (gathered + reduced), rel=1e-3)


def test_switches_that_sum_take_the_gradients_once() -> None:
    """SHARP (doi 10.1109/COMHPC.2016.006): each node sends S and receives S; each of its 8 GPUs an eighth, of fp32."""
    cluster = Cluster.load("hgx-h100-8", 4)
    cluster = cluster.model_copy(update={"fabric": cluster.fabric.model_copy(update={"in_network": True})})
    plan = Plan(dp_replicate=32, zero=0, seq_len=1024)
    found = telemetry(predict(LLAMA, plan, cluster), LLAMA, plan, cluster).programs[0]
    assert found.of("nic").amount == pytest.approx(4 * LLAMA.num_parameters / 8, rel=1e-3)


def test_zero_3_puts_half_more_on_pcie_than_zero_2() -> None:
    """ZeRO's table: 3 Ψ against 2 Ψ. Small tensors stay whole under ZeRO-3, which is the tolerance."""
    two, three = (told(deepspeed(zero), "pcie-a100-80-8")[1].programs[0].of("pcie up").amount for zero in (2, 3))
    assert three / two == pytest.approx(1.5, rel=0.02)


def test_use_of_tensor_cores_is_the_hardware_flop_utilisation() -> None:
    for plan in (
        Plan(dp_shard=8, seq_len=1024, recompute="full"),
        Plan(tp=2, pp=2, dp_shard=2, zero=1, data_parallel="megatron", seq_len=1024, num_micro_batches=8),
        Plan(pp=2, dp_shard=4, zero=1, schedule="dualpipe", virtual_stages=2, seq_len=1024, num_micro_batches=8),
        Plan(dp_replicate=8, zero=0, sync_every_steps=4, seq_len=1024),
    ):
        prediction, found = told(plan)
        ranks = sum(program.num_ranks for program in found.programs)
        mean = sum(program.num_ranks * program.of("tensor").mean for program in found.programs) / ranks
        assert mean == pytest.approx(prediction.hfu, rel=1e-6)
        assert all(0 <= use.mean <= use.peak <= 1 for program in found.programs for use in program.uses)


def test_rates_over_the_step_sum_to_its_bytes() -> None:
    """Where every micro-batch is played."""
    for use in told(Plan(dp_shard=8, seq_len=1024))[1].programs[0].uses:
        if use.rates:
            area = sum(rate * (until - at) for (at, rate), (until, _) in pairwise(use.rates))
            assert area == pytest.approx(use.amount, rel=1e-6), use.name


def test_each_further_micro_batch_adds_the_same() -> None:
    amounts = [told(Plan(dp_shard=8, seq_len=1024, num_micro_batches=n))[1].programs[0] for n in (2, 5, 8)]
    for name in ("tensor", "hbm", "nvlink"):
        first, second, third = (one.of(name).amount for one in amounts)
        assert third - second == pytest.approx(second - first, rel=1e-9)


@pytest.mark.parametrize(
    "fields",
    [
        {"dp_shard": 8, "num_micro_batches": 11},
        {"pp": 2, "tp": 2, "dp_shard": 2, "zero": 1, "num_micro_batches": 23},
        {"pp": 2, "tp": 2, "dp_shard": 2, "zero": 1, "num_micro_batches": 24, "virtual_stages": 2},
        {
            "pp": 2,
            "tp": 2,
            "dp_shard": 2,
            "zero": 1,
            "num_micro_batches": 24,
            "virtual_stages": 2,
            "schedule": "dualpipe",
        },
    ],
    ids=["fsdp2", "1f1b", "interleaved", "dualpipe"],
)
def test_micro_batches_that_repeat_count_as_if_each_was_there(fields: dict[str, object]) -> None:
    """Against the program with every one of them: bytes by kind of collective, and seconds of compute."""
    plan = Plan.model_validate({"seq_len": 512, **fields})
    cluster = Cluster.load("dgx-a100-80-8")
    calibration = Calibration.for_device(cluster.device)
    lowering = lower(LLAMA, plan, cluster, Stack.of(plan), calibration, default_curves())
    for work, program in zip(rank_works(lowering), lowering.programs(plan.num_micro_batches), strict=True):
        whole = RankWork(lowering, work.stage, ((1.0, program),))
        assert len(work.programs) > 1
        assert work.compute_s == pytest.approx(whole.compute_s)
        assert sizes(work) == pytest.approx(sizes(whole))


def sizes(work: RankWork) -> dict[str, float]:
    found: dict[str, float] = {}
    sent = [(op.kind, times * op.size_bytes) for times, op in work.ops if isinstance(op, Collective)]
    for kind, size in (*sent, *((kind, size * count) for kind, _, size, count in work.exchanges)):
        found[kind] = found.get(kind, 0.0) + size
    return found


def test_a_pipelines_messages_and_tensor_parallel_sums_count_in_every_micro_batch() -> None:
    """Four sums of b s d a layer (arXiv 1909.08053, section 3), each sent 2 (t - 1) / t times by a ring."""
    plan = Plan(tp=2, pp=2, dp_shard=2, zero=1, data_parallel="megatron", seq_len=1024, num_micro_batches=32)
    size = 1024 * LLAMA.d_model * 2
    per_micro_batch = (LLAMA.num_layers // 2) * 4 * size * 2 * (2 - 1) / 2
    more = told(plan)[1].programs[0].of("nvlink").amount
    less = told(plan.copy_with(num_micro_batches=16))[1].programs[0].of("nvlink").amount
    message = size  # to the next stage; what comes back is the other's
    assert more - less == pytest.approx(16 * (per_micro_batch + message), rel=0.07)  # and the embedding's sum


def test_percentiles_of_the_slowest_rank() -> None:
    """P(all of n below x) = F(x)^n, written with the error function."""
    found = step_percentiles(1.0, 64, 0.02)
    median = 1 + 0.02 * _quantile_of_largest(0.5, 64)
    for share in (0.05, 0.5, 0.9, 0.99):
        assert found[f"p{100 * share:g}"] * median == pytest.approx(
            1 + 0.02 * _quantile_of_largest(share, 64), rel=1e-6
        )
    assert step_percentiles(1.0, 64, 0.0) == {}


def _quantile_of_largest(share: float, count: int) -> float:
    low, high = -10.0, 10.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        below = (0.5 * (1 + math.erf(middle / math.sqrt(2)))) ** count
        low, high = (middle, high) if below < share else (low, middle)
    return low


def test_the_trace_has_counters_and_names_its_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "predict",
        "--model",
        "llama3.2-1b",
        "--cluster",
        "dgx-a100-80-8",
        "--data-parallel",
        "deepspeed",
        "--zero",
        "3",
    ]
    words += ["--set", "plan.offload.optimizer=nvme", "--set", "plan.offload.parameters=nvme"]
    file = tmp_path / "step.json.gz"
    assert main([*words, "--telemetry", "--trace", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert {"hbm (%)", "nvlink (%)", "pcie up (%)", "nvme read (%)", "nvme queue (requests)"} <= counters
    gaps: dict[str, float] = {}
    for event in events:
        if event.get("cat") == "gap":
            gaps[event["name"]] = gaps.get(event["name"], 0.0) + event["dur"] / 1e6
    waited = {name: s for name, s in document["breakdown_s"].items() if name in gaps}
    assert gaps == pytest.approx(waited, abs=1e-6 * len(events))
    assert sum(waited.values()) > 0.5 * document["step_s"]  # drives and the host decide here
    program = document["telemetry"]["programs"][0]
    assert program["nvme_queue_peak"] == 2 * 8 * 8  # reads beside writes, 8 ranks, 8 requests each
    assert 0 < program["nvme_queue_mean"] < program["nvme_queue_peak"]
    assert document["telemetry"]["samples_per_s"] == pytest.approx(8 / document["step_s"])


def test_what_cannot_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--step-jitter", "0.01"]) == 2
    assert "--step-jitter needs --telemetry" in capsys.readouterr().err
    assert main(["predict", "--telemetry", "--step-jitter", "0.5"]) == 2
    assert "0.5 is not in the range" in capsys.readouterr().err
