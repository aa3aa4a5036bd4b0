"""1-bit Adam, 1-bit LAMB and 0/1 Adam: volumes, states and step counts of their papers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simulator.base.errors import PlanError
from simulator.base.kernels import Stream
from simulator.cli import main
from simulator.parallel.legality import check
from simulator.predict.phases import Phases, step_counts
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.compression import OneBit
from simulator.work.ops import optimizer_kernels
from simulator.work.script import agreement, communication, resident_tensors

RANKS = 16
# Every tensor is a multiple of 16 ranks times 16 bytes of signs, so that no padding hides in the figures
MODEL = Model(name="even", num_layers=3, d_model=256, num_heads=4, d_ff=1024, vocab_size=2048)
PSI = MODEL.num_parameters


def plan(kind: str, **fields: object) -> Plan:
    one_bit = {"kind": kind} | {name: fields.pop(name) for name in ("interval",) if name in fields}
    base = {"zero": 0, "dp_replicate": RANKS, "data_parallel": "deepspeed", "precision": "fp16", "one_bit": one_bit}
    return Plan.model_validate({**base, **fields})


@pytest.mark.parametrize("kind", ["adam", "lamb", "zero_one"])
def test_signs_are_a_sixteenth_of_16_bit_gradients(kind: str) -> None:
    """arXiv 2102.02888, section 4.3: 16 times less than fp16. An all-reduce sends 2 (n - 1) / n of 2 bytes a parameter."""
    hops = [hop for hop in agreement(MODEL, plan(kind)) if hop.kind]
    share = (RANKS - 1) / RANKS
    signs = sum(share * hop.size_bytes for hop in hops if hop.size_bytes > 4 * RANKS)
    assert 2 * share * 2 * PSI / signs == pytest.approx(16, rel=1e-3)
    assert [hop.kind for hop in hops if hop.size_bytes > 4 * RANKS] == ["all_to_all", "all_gather"]
    assert sum(comm.all_reduce_bytes for comm in communication(MODEL, plan(kind))) == 0
    assert sum(comm.all_reduce_bytes for comm in communication(MODEL, plan("none"))) == pytest.approx(2 * PSI, rel=1e-3)


def test_fp32_tensors_are_compressed_one_by_one() -> None:
    (first, *_) = agreement(MODEL, plan("adam", precision="fp32", optimizer_impl="foreach"))
    assert first.count > 1
    assert agreement(MODEL, plan("adam"))[0].count == 1


@pytest.mark.parametrize(("kind", "further"), [("adam", 0), ("zero_one", 4), ("lamb", 4)])
def test_errors_of_both_compressions_are_kept(kind: str, further: int) -> None:
    """A rank's error of all it sends, and of the chunk that it sums: 4 + 4 / n bytes a parameter (algorithm 1)."""
    bare, found = (sum(resident_tensors(MODEL, plan(one))["optimizer_state"]) for one in ("none", kind))
    assert found - bare == pytest.approx((4 + 4 / RANKS + further) * PSI, rel=1e-3)


def test_the_volume_of_a_run_with_a_warm_up() -> None:
    """1 / (w + (1 - w) / 16): five times less than Adam with a warm-up of 15 % (section 4.3; "up to 5x")."""
    counts = step_counts(OneBit(kind="adam", freeze_step=15_000), 100_000)
    assert counts == {"full": 15_000, "one_bit": 85_000, "local": 0}
    assert 100_000 / (counts["full"] + counts["one_bit"] / 16) == pytest.approx(1 / (0.15 + 0.85 / 16))


def test_intervals_of_0_1_adam_double() -> None:
    """arXiv 2202.06009, section 6: 16 updates of the variance at each of the intervals 1, 2, 4; sums at 1, 2, ... up to H."""
    one = OneBit(kind="zero_one", freeze_step=16 * (1 + 2 + 4), local_step_scaler=100, local_step_clipper=4)
    early = step_counts(one, one.freeze_step)
    assert early["full"] + early["one_bit"] == one.freeze_step
    assert early["full"] == pytest.approx(3 * 16, abs=2)
    late = step_counts(one, one.freeze_step + 600)
    sums = late["one_bit"] - early["one_bit"]
    assert sums == pytest.approx(100 + 100 / 2 + 400 / 4, abs=3)
    assert late["local"] == 600 - sums
    assert step_counts(one, 0) == {"full": 0, "one_bit": 0, "local": 0}


def test_the_mean_step_weighs_the_phases() -> None:
    counts = {"full": 1, "one_bit": 2, "local": 1}
    found = Phases(counts=counts, seconds={"full": 4.0, "one_bit": 1.0, "local": 0.5})
    assert (found.mean_s, found.speedup) == (pytest.approx(6.5 / 4), pytest.approx(4 / (6.5 / 4)))


def test_phases_are_steps_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Slow links: sums of gradients are the longest steps, steps without sums the shortest, and H steps their mean."""
    words = ["predict", "--model", "gpt2", "--nodes", "2", "--zero", "0", "--data-parallel", "deepspeed"]
    words += [
        "--dp-replicate",
        "16",
        "--set",
        "plan.seq_len=256",
        "--set",
        "cluster.inter.nic_bytes_per_s=5Gb/s",
        "--json",
    ]

    def step(*fields: str) -> dict[str, object]:
        assert main([*words, *(word for one in fields for word in ("--set", f"plan.one_bit.{one}"))]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    told = step("kind=zero_one", "interval=4", "run_steps=1000", "freeze_step=500", "local_step_scaler=50")
    seconds = told["phases"]["seconds"]  # type: ignore[index]
    assert seconds["full"] > seconds["one_bit"] > seconds["local"]
    assert told["step_s"] == pytest.approx((seconds["one_bit"] + 3 * seconds["local"]) / 4)
    assert step()["step_s"] == pytest.approx(seconds["full"])
    assert "phases" not in step("kind=adam")


def test_lamb_reads_and_writes_what_its_formulas_name() -> None:
    """Of fp32 tensors. Algorithm 2 of LAMB (arXiv 1904.00962) fused as DeepSpeed does: w, g, m, v read, m, v written and both norms
    summed; w, m, v read and w written. Operator by operator, the squares and roots of 1-bit LAMB (arXiv 2104.06069, algorithm 1)
    pass through memory too: never fewer bytes than the fused kernels, behind the warm-up more than in it.
    """

    def moved(**fields: object) -> tuple[int, int]:
        kernels = optimizer_kernels(1000, 10, plan(**{"kind": "none", "precision": "fp32", **fields}))  # type: ignore[arg-type]
        return sum(one.num_bytes for one in kernels), sum(one.launches for one in kernels if isinstance(one, Stream))

    w, g, m, v = (4 * 1000,) * 4
    fused, launches = moved(optimizer="lamb")
    assert fused == (w + g + m + v) + (m + v) + (w + m + v) + w
    assert launches == 3 * 10  # squares, their sums, the step, of each tensor
    eager, warm = moved(optimizer="lamb", optimizer_impl="loop")
    signs, cold = moved(kind="lamb")
    assert moved(kind="adam")[0] < fused < eager < signs
    assert 10 < launches < warm < cold


def test_lamb_needs_whole_layers() -> None:
    for fields in ({"zero": 1, "dp_replicate": 1, "dp_shard": RANKS}, {"tp": 2}):
        with pytest.raises(PlanError, match="norms of whole layers"):
            check(plan("none", optimizer="lamb", **fields))
    states = [sum(resident_tensors(MODEL, plan("none", optimizer=one))["optimizer_state"]) for one in ("adam", "lamb")]
    assert states[0] - 4 == states[1]  # torch's fused Adam counts its steps in a tensor


def test_the_warm_up_of_1_bit_lamb_is_lambs(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "predict",
        "--model",
        "gpt2",
        "--zero",
        "0",
        "--data-parallel",
        "deepspeed",
        "--dp-replicate",
        "8",
        "--json",
    ]

    def told(*more: str) -> dict[str, Any]:
        assert main([*words, "--set", "plan.seq_len=256", *more]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    found = told("--set", "plan.one_bit.kind=lamb", "--set", "plan.one_bit.run_steps=200000")
    seconds, held = found["phases"]["seconds"], found["memory"]
    assert held["peak_moment"].startswith("optimizer")
    assert held["by_category"]["temporaries"] == pytest.approx(
        4 * Model.load("gpt2").num_parameters, rel=1e-3
    )  # moments kept
    assert seconds["full"] == told("--optimizer", "lamb", "--optimizer-impl", "loop")["step_s"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"zero": 1, "dp_replicate": 1, "dp_shard": RANKS}, "not deepspeed with zero = 1"),
        ({"data_parallel": "ddp"}, "not ddp with zero = 0"),
        ({"optimizer": "adam8bit"}, "beside optimizer = adam8bit"),
        ({"tp": 2}, "are not modelled"),
        ({"interval": 4}, "local steps are 0/1 Adam's"),
    ],
)
def test_combinations_without_meaning(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check(plan("adam", **fields))
