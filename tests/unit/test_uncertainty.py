"""Intervals know what they do not know: software that nobody named, hosts that nobody measured."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, get_args

import pytest

from simulator.predict import Z90, Prediction, predict
from simulator.predict.confidence import HOST_SIGMA, QUEUE, ROWS, SHEET, WAITING, kind_of
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.intervals import intervals
from simulator.spec.calibration.learned import Learned
from simulator.spec.calibration.networks import FILE, carrier_of, slow_network
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.parts import InterKind
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack


def predicted(known: str | None = None, **plan: Any) -> Prediction:
    """Llama 3 8B on one node. known: what its stack says of itself; None leaves that to the plan."""
    fields = {"dp_shard": 8, "seq_len": 4096, "micro_batch_size": 1} | plan
    parsed = Plan.model_validate(fields)
    stack = Stack.load(parsed.stack).copy_with(known=known) if known else None
    return predict(Model.load("llama3-8b"), parsed, Cluster.load("hgx-h100-8"), stack=stack)


def width(prediction: Prediction) -> float:
    return prediction.high_s / prediction.low_s


def test_the_less_is_known_of_the_software_the_wider_is_the_interval() -> None:
    described, assumed, unknown = (predicted(known) for known in ("described", "assumed", "unknown"))
    assert described.step_s == assumed.step_s == unknown.step_s
    assert width(described) < width(assumed) < width(unknown)
    assert "software" not in described.uncertainty
    assert described.uncertainty.items() <= assumed.uncertainty.items()


def test_a_plan_that_names_its_stack_is_described() -> None:
    unnamed, named = predicted(), predicted(stack=Plan().stack)
    assert unnamed.step_s == named.step_s
    assert width(named) < width(unnamed)
    assert any("nobody named the software" in source.detail for source in unnamed.sources)
    assert not any("nobody named the software" in source.detail for source in named.sources)


def test_a_step_that_a_slower_host_would_lengthen_says_so() -> None:
    small = predicted("described", tp=8, dp_shard=1, zero=0, seq_len=256)
    large = predicted("described", tp=2, dp_shard=1, dp_replicate=4, zero=0, seq_len=8192)
    assert small.uncertainty.get("host", 0.0) > 0.1
    assert large.uncertainty.get("host", 0.0) < 0.02


def test_the_host_of_a_program_that_nobody_described_is_less_known_than_one_that_was_read() -> None:
    """Where hosts set the pace the interval shows it, where they keep far ahead it does not."""
    small = predicted("unknown", tp=8, dp_shard=1, zero=0, seq_len=256)
    large = predicted("unknown", tp=2, dp_shard=1, dp_replicate=4, zero=0, seq_len=8192)
    known, unknown = (small.spread[name] / intervals().factor(kind_of(name)) for name in ("host", "software: host"))
    assert unknown > 1.5 * known
    assert large.spread.get("software: host", 0.0) < 0.02


def test_stages_that_wait_for_each_others_hosts_hang_on_hosts() -> None:
    """The last stage is busy with the head; what it waits for is the others' launches, which is the bubble of its breakdown."""
    model = Model.load("llama3-8b").model_copy(
        update={"d_model": 256, "d_ff": 512, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64}
    )
    fields = {"dp_shard": 2, "pp": 4, "seq_len": 1024, "micro_batch_size": 1, "num_micro_batches": 4}
    plan = Plan.model_validate(fields | {"data_parallel": "megatron", "zero": 1, "stack": "megatron-core-2025"})
    step = predict(model, plan, Cluster.load("hgx-h100-8"))
    alone = step.breakdown["host"] / step.step_s
    assert step.breakdown["bubble"] > 0
    assert step.uncertainty["host"] > 1.2 * alone * HOST_SIGMA * intervals().factor("host")


def test_parts_make_the_interval() -> None:
    for known in ("described", "unknown"):
        prediction = predicted(known)
        total = sum(one**2 for one in prediction.uncertainty.values()) ** 0.5
        squares = sum(one**2 for one in prediction.spread.values()) + prediction.stack_sigma**2
        assert total == pytest.approx(squares**0.5)
        assert prediction.high_s / prediction.step_s == pytest.approx(2.718281828459045 ** (1.6449 * total))


def test_software_that_no_file_names_is_unknown_in_a_table() -> None:
    from simulator.studies.backtest.resolve import resolve
    from simulator.studies.backtest.rows import RunRow

    row = RunRow(line=2, id="a", framework="Nobody's trainer 3", n_layers=32, d_model=4096, n_heads=32, d_ff=11008, vocab=32000,
                 mlp_kind="swiglu", seq_len=2048, gpu="H100-80GB-SXM", n_gpus=8, micro_batch=1, global_batch=8, precision="bf16",
                 zero_or_fsdp="fsdp_full", act_ckpt="none", flash_attn="y", metric="step_time_s", value=1.0)  # fmt: skip
    from dataclasses import replace

    assert resolve(row).stack.known == "unknown"
    assert resolve(replace(row, framework="")).stack.known == "assumed"
    assert resolve(replace(row, framework="torchtitan 2025-06")).stack.known == "described"
    assert resolve(replace(row, stack="torch-2.11-eager")).stack.known == "described"


def test_kernels_that_nobody_timed_widen_by_their_share() -> None:
    """Dequantised weights weigh the more, the fewer tokens read them; weights of 16 bits have no such kernel."""
    adapted = {"dp_shard": 1, "dp_replicate": 8, "zero": 0, "lora_rank": 16, "master_dtype": "bf16"}
    plain = predicted("described", **adapted, peft="lora")
    long, short = (predicted("described", **adapted, peft="qlora", seq_len=tokens) for tokens in (4096, 512))
    name = "kernels without a measurement"
    assert name not in plain.uncertainty
    assert 0 < 4 * long.uncertainty[name] < short.uncertainty[name]
    assert width(plain) < width(long) < width(short)


def test_products_with_a_scale_a_row_are_less_known_than_those_with_one() -> None:
    rows, one = (
        predicted(stack="torch-2.11-compiled", precision="fp8", fp8_recipe=recipe)
        for recipe in ("rowwise", "tensorwise")
    )
    assert rows.uncertainty["gemm"] > 2 * one.uncertainty["gemm"]


def test_rows_under_tensor_parallelism_may_gain_nothing_over_16_bits() -> None:
    """At the upper end alone products take twice as long; scales of tensors, and rows on one rank, have no such end."""
    cut: dict[str, Any] = {
        "tp": 8,
        "dp_shard": 1,
        "sequence_parallel": True,
        "stack": "torch-2.11-compiled",
        "precision": "fp8",
    }
    rows, tensors = (predicted(**cut, fp8_recipe=recipe) for recipe in ("rowwise", "tensorwise"))
    alone = predicted(**cut | {"dp_shard": 8, "tp": 1, "sequence_parallel": False}, fp8_recipe="rowwise")
    assert ROWS not in tensors.uncertainty
    assert ROWS not in alone.uncertainty
    longer_s = rows.step_s * math.exp(Z90 * rows.uncertainty[ROWS]) - rows.step_s
    assert longer_s == pytest.approx(rows.breakdown["gemm"])
    up, down = math.log(rows.high_s / rows.step_s), math.log(rows.step_s / rows.low_s)
    assert up**2 - down**2 >= (Z90 * rows.uncertainty[ROWS]) ** 2


def test_mixtures_are_less_known_than_dense_models() -> None:
    plan = Plan(dp_shard=8, ep=8, seq_len=4096, micro_batch_size=1, stack="torch-2.11-eager")
    parts = predict(Model.load("mixtral-8x7b"), plan, Cluster.load("hgx-h100-8")).uncertainty
    assert parts["release of torch-2.11-eager"] > 0.1
    assert not any(name.startswith("release") for name in predicted(stack="torch-2.11-eager").uncertainty)


# -- networks that nobody measured


def over_nodes(cluster: Cluster, **plan: Any) -> Prediction:
    """Llama 3 8B sharded over eight nodes."""
    fields = {"dp_shard": 64, "zero": 3, "seq_len": 4096, "micro_batch_size": 1, "stack": "torch-2.11-eager"} | plan
    return predict(Model.load("llama3-8b"), Plan.model_validate(fields), cluster)


def test_a_network_known_by_its_sheet_may_be_slower_but_hardly_faster() -> None:
    """The same machine by name, by its GPU, and with one number as it was measured."""
    named, by_gpu = Cluster.load("dgx-h100-8", 8), Cluster.load("64xh100")
    stated = by_gpu.with_measured([{"collective": "all_gather", "nodes": 8, "bus_bytes_per_s": "340GB/s"}], "here")
    known, sheet, measured = map(over_nodes, (named, by_gpu, stated))
    assert (known.step_s, known.low_s) == (sheet.step_s, sheet.low_s)
    assert SHEET not in known.uncertainty
    assert SHEET not in measured.uncertainty
    up = [math.log(one.high_s / one.step_s) for one in (known, sheet)]
    assert sheet.uncertainty[SHEET] > 0.01
    assert up[1] ** 2 - up[0] ** 2 == pytest.approx((Z90 * sheet.uncertainty[SHEET]) ** 2)


def test_what_a_slow_network_does_is_what_the_step_hangs_on_it() -> None:
    """More tokens for the same exchanged bytes, or none exchanged over nodes."""
    by_gpu = Cluster.load("64xh100")
    short, long = (over_nodes(by_gpu, micro_batch_size=size).uncertainty[SHEET] for size in (1, 8))
    assert short > 2 * long > 0
    assert SHEET not in over_nodes(Cluster.load("8xh100"), dp_shard=8).uncertainty


def test_the_slow_network_waits_and_flows_as_the_sweeps_say() -> None:
    """Replayed by hand: bytes and waits of calls between nodes alone."""
    slow, model = slow_network(), Model.load("llama3-8b")
    plan = Plan(dp_shard=64, zero=3, seq_len=4096, micro_batch_size=1, stack="torch-2.11-eager")
    by_gpu = Cluster.load("64xh100")
    more = slow.beyond(8)
    assert more == pytest.approx(math.exp(2 * slow.per_doubling))
    fabric = by_gpu.fabric.model_copy(
        update={"speed": 1 / (slow.slow_bytes["verbs"] * more), "wait": slow.slow_waits["verbs"] * more}
    )
    slower = predict(model, plan, by_gpu.model_copy(update={"fabric": fabric}))
    found = over_nodes(by_gpu)
    assert math.exp(Z90 * found.uncertainty[SHEET]) == pytest.approx(slower.step_s / found.step_s)
    carriers = {"infiniband": "verbs", "roce": "verbs", "efa": "efa", "tcpx": "plugin", "ethernet": "tcp"}
    assert {kind: carrier_of(kind) for kind in get_args(InterKind) if kind in carriers} == carriers
    assert slow.slow_bytes["verbs"] < slow.slow_bytes["efa"] < slow.slow_bytes["plugin"]  # what may be missing or old


def test_hosts_that_may_wait_for_every_rank_lengthen_the_upper_end_by_what_they_would() -> None:
    """As they wait where the cluster says so; nothing of it where it says that they do not, or on one node."""
    known = Cluster.load("dgx-h100-8", 2)
    plan = {"tp": 8, "dp_shard": 2, "stack": "nanotron-2025", "data_parallel": "nanotron", "zero": 1}
    found, rank_s = over_nodes(known, **plan), Stack.load("nanotron-2025").fitted.rank_wait_s
    stated = {
        wait_s: over_nodes(
            known.model_copy(update={"fabric": known.fabric.model_copy(update={"call_rank_s": wait_s})}), **plan
        )
        for wait_s in (0.0, rank_s)
    }
    assert math.exp(Z90 * found.uncertainty[WAITING]) == pytest.approx(stated[rank_s].step_s / found.step_s)
    assert stated[rank_s].step_s > 1.01 * found.step_s
    assert all(WAITING not in one.uncertainty for one in (*stated.values(), over_nodes(Cluster.load("64xh100"))))
    assert WAITING not in over_nodes(Cluster.load("dgx-h100-8", 1), **plan | {"dp_shard": 1}).uncertainty


def test_the_slow_end_is_in_the_slow_mode_as_far_as_its_share_says() -> None:
    import networks_by_sheet as sheets

    def sample(healthy: int, slow: list[float]) -> list[sheets.Unit]:
        ratios = [0.0] * healthy + slow
        return [sheets.Unit(str(n), "efa", "", "all_reduce", 2, "bytes", one) for n, one in enumerate(ratios)]

    # 4.5 of 45 machines are slow, at 1 ± 0.5: one in twenty is half of them, and so above their middle
    assert sheets.slow_end(sample(40, [0.5, 0.5, 1.5, 1.5])) == pytest.approx(1.0)
    assert sheets.slow_end(sample(400, [1.0])) == sheets.SLOW  # fewer than one in twenty
    told = [replace(one, reported=one.ratio > 1) for one in sample(40, [0.5, 0.5, 1.5, 1.5])]
    assert sheets.slow_end(told) < 1.0  # who was published for being slow is not counted: 2.5 of 43
    few, many = (sheets.slow_end(sample(healthy, [0.5, 1.5])) for healthy in (30, 5))
    assert few < 1.0 < many
    twice = [
        *sample(40, [0.5, 0.5, 1.5]),
        *(sheets.Unit("43", "efa", one, "all_reduce", 2, "bytes", 1.5) for one in "abc"),
    ]
    assert sheets.slow_end(twice) == pytest.approx(1.0)  # a machine's weight is shared by what it measured
    assert FILE.read_text(encoding="utf-8") == json.dumps(sheets.document(), indent=1, ensure_ascii=False) + "\n"


def test_runs_that_showed_the_network_leave_nothing_to_its_sheet() -> None:
    plan = Plan(dp_shard=64, zero=3, seq_len=4096, micro_batch_size=1, stack="torch-2.11-eager")
    by_gpu = Cluster.load("64xh100")
    found = []
    for name in ("software", "network"):
        one = {"name": name, "value": 0.1, "prior_sigma": 0.3, "sigma": 0.1}
        learned = Learned.model_validate_json(json.dumps({"name": "mine", "runs": ["a"], "coefficients": [one], "covariance": [[0.01]],
                                                          "scatter": 0.02, "reach": 1.8}))  # fmt: skip
        calibration = Calibration.for_device(by_gpu.device).with_learned(learned)
        found.append(predict(Model.load("llama3-8b"), plan, by_gpu, calibration).uncertainty)
    assert SHEET in found[0]
    assert SHEET not in found[1]


def test_a_host_bound_step_hangs_on_its_host_however_many_micro_batches_repeat() -> None:
    """Micro-batches that repeat are played once; what the host issues is that of all of them, as the step is."""
    model, cluster = Model.load("llama3.2-1b"), Cluster.synthesise("a100-80gb", 1)
    fields: dict[str, Any] = {
        "zero": 0,
        "data_parallel": "ddp",
        "seq_len": 128,
        "micro_batch_size": 1,
        "recompute": "full",
        "peft": "lora",
    }
    for count in (1, 2, 32):
        plan = Plan(**fields, num_micro_batches=count, stack="transformers-2024")
        step = predict(model, plan, cluster)
        parts, slow = step.uncertainty, math.exp(Z90 * HOST_SIGMA)
        # a faster host is worth what the step waits for it; launches take nearly all of it, so a slower one is worth itself
        fast_s = step.step_s - step.breakdown["host"] * (1 - 1 / slow)
        factor = intervals().factor("host")
        assert math.exp(-Z90 * parts["host"] / factor) * step.step_s == pytest.approx(fast_s), count
        assert math.hypot(parts["host"], parts["slower host"]) / factor == pytest.approx(HOST_SIGMA, rel=0.15), count


def test_slow_links_lengthen_a_step_by_what_they_carry_hidden_or_not() -> None:
    """Through a host's memory collectives lie a factor of exp(0.7 z) apart: what hides behind compute now may not there."""
    model, cluster = Model.load("llama2-7b"), Cluster.load("pcie-rtx4090-4")
    fields: dict[str, Any] = {
        "dp_shard": 4,
        "zero": 3,
        "data_parallel": "fsdp1",
        "micro_batch_size": 1,
        "recompute": "full",
    }
    for seq_len in (512, 4096):
        step = predict(model, Plan(**fields, seq_len=seq_len, stack="torch-2.6-eager"), cluster)
        exposed_s, hidden_s = step.communication["all_gather"]
        slow = math.exp(Z90 * 0.7)  # at least: simulator/work/collectives/effects.py, _HOST_SIGMA
        least_s = max(step.step_s + (slow - 1) * exposed_s, slow * (exposed_s + hidden_s))
        factor = intervals().factor("pcie")
        fast, late = (step.uncertainty[name] / factor for name in ("PCIe", "slower PCIe"))
        assert math.exp(Z90 * math.hypot(fast, late)) * step.step_s >= least_s * (1 - 1e-9)
        waited_s = sum(s for name, s in step.breakdown.items() if name.startswith("exposed:") or name == "interference")
        assert math.exp(-Z90 * fast) * step.step_s > step.step_s - waited_s  # no link takes less than no time


def test_what_a_collective_waits_for_its_last_rank_is_known_as_well_as_hosts_are() -> None:
    """Each rank has a host of its own; of sums of some 0.1 ms that wait for 10 ms, the waits are all that is unknown."""
    model, cluster = Model.load("llama3.2-1b"), Cluster.load("hgx-a100-80-8")
    plan = Plan(dp_shard=1, tp=8, zero=0, seq_len=512, micro_batch_size=1, data_parallel="megatron", precision="fp16")
    late = Stack.load("megatron-style-2023-by-layer").copy_with(collective_wait_s=0.01)
    step = predict(model, plan, cluster, stack=late)
    waited_s = step.breakdown["exposed:all_reduce"]
    assert waited_s > 0.9 * step.step_s
    fast_s = step.step_s - waited_s * (1 - math.exp(-Z90 * HOST_SIGMA))
    parts = step.uncertainty["node links"] / intervals().factor("links")
    assert math.exp(-Z90 * parts) * step.step_s == pytest.approx(fast_s, rel=0.02)


def test_loops_over_experts_are_less_known_than_grouped_products() -> None:
    plan = Plan(dp_shard=8, seq_len=4096, micro_batch_size=1, stack="torch-2.6-eager")
    loops = predict(Model.load("mixtral-8x7b"), plan, Cluster.load("hgx-h100-8")).uncertainty
    assert "release of torch-2.6-eager" not in loops
    # a factor of 1.4, half of what is unknown of programs that nobody described, at the ends of the 90 %
    assert math.exp(Z90 * loops["eager experts"] / intervals().factor("eager experts")) == pytest.approx(math.sqrt(2))


def test_messages_are_as_sure_as_what_carries_them() -> None:
    """Exchanges of experts are known by themselves where they go between nodes; inside of one they are on the links of all others."""
    model, cluster = Model.load("qwen3-30b-a3b"), Cluster.load("dgx-h100-8", 4)
    found = {}
    for ep in (8, 32):
        fields = {
            "dp_shard": 32,
            "ep": ep,
            "zero": 1,
            "data_parallel": "megatron",
            "seq_len": 4096,
            "micro_batch_size": 1,
        }
        found[ep] = predict(model, Plan.model_validate(fields | {"stack": "megatron-core-2025"}), cluster).uncertainty
    carried = {ep: {"node links", "network", "exchanges between nodes"} & parts.keys() for ep, parts in found.items()}
    assert carried == {8: {"node links", "network"}, 32: {"network", "exchanges between nodes"}}


def test_where_nobody_names_the_software_it_is_that_of_the_plans_layers() -> None:
    """Megatron's data parallelism comes with Megatron-Core's layers, not with one kernel an operator."""
    own, users = Stack.of(Plan(data_parallel="megatron", zero=1)), Stack.of(Plan(data_parallel="fsdp2"))
    assert (own.kernels.blocks, users.kernels.blocks) == ("fused", "eager")
    assert own.known == users.known == "assumed"
    assert Stack.of(Plan(data_parallel="megatron", zero=1, stack=users.name)).kernels.blocks == "eager"


def test_exchanges_beside_tensor_parallelism_may_overlap_nothing() -> None:
    """Megatron wants one hardware queue for the one and more for the other; the end is the step with all exchanges in sight."""
    model, cluster = Model.load("mixtral-8x7b").model_copy(update={"num_layers": 4}), Cluster.load("hgx-h100-8", 8)
    plan = Plan(
        data_parallel="megatron", dp_shard=16, zero=1, ep=8, etp=1, pp=2, virtual_stages=2, num_micro_batches=4, tp=2,
        sequence_parallel=True, seq_len=4096, micro_batch_size=2, expert_overlap=True,
    )  # fmt: skip
    paired, alone = predict(model, plan, cluster), predict(model, plan.copy_with(expert_overlap=False), cluster)
    hidden_s = alone.communication["all_to_all"][0] - paired.communication["all_to_all"][0]
    assert hidden_s > 0
    assert paired.step_s * math.exp(Z90 * paired.uncertainty[QUEUE]) == pytest.approx(paired.step_s + hidden_s)
    assert QUEUE not in alone.uncertainty
    whole = plan.copy_with(tp=1, sequence_parallel=False)
    assert QUEUE not in predict(model, whole, cluster.with_nodes(4)).uncertainty
