"""Laws of clusters whose GPUs differ: what folding finds is what every rank plays, and nothing is lost on the way."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.base.errors import ClusterError
from simulator.play.lower import Lowering, lower
from simulator.predict.play import play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.model.experts import Experts
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from tests.examples import examples
from tests.program_check import check

MODEL = Model(
    name="small",
    family="llama",
    num_layers=5,
    d_model=512,
    num_heads=8,
    num_kv_heads=4,
    d_ff=1024,
    mlp="swiglu",
    norm="rms",
    positions="rope",
    vocab_size=4096,
)
# On 16 GPUs: what shards, replicates and splits
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp_shard": 16},
    {"dp_shard": 4, "dp_replicate": 4},
    {"dp_replicate": 16, "zero": 0},
    {"dp_shard": 16, "zero": 1, "data_parallel": "megatron", "num_micro_batches": 5},
    {"dp_shard": 4, "tp": 4},
    {"dp_shard": 4, "tp": 2, "cp": 2, "rank_order": "dp-cp-tp-pp"},
    {"dp_shard": 4, "pp": 4, "num_micro_batches": 6, "rank_order": "tp-pp-dp"},
    {"tp": 2, "pp": 4, "dp_replicate": 2, "zero": 0, "data_parallel": "ddp", "num_micro_batches": 6},
    {"tp": 2, "pp": 2, "cp": 2, "dp_shard": 2, "zero": 1, "data_parallel": "megatron", "schedule": "zb_h1"},
    {"tp": 2, "pp": 2, "dp_shard": 4, "zero": 1, "data_parallel": "megatron", "num_micro_batches": 20},
    {"dp_shard": 8, "tp": 2, "ep": 4, "zero": 1, "data_parallel": "megatron", "sequence_parallel": True},
    {"dp_shard": 8, "dp_replicate": 2, "ep": 4},
)
MIXTURE = MODEL.model_copy(update={"experts": Experts(num_experts=8, top_k=2, d_ff=256)})
SPANS = st.sampled_from(("0", "1", "3", "0-1", "1,3"))


@st.composite
def exceptions(draw: st.DrawFn) -> list[dict[str, Any]]:
    """One or two: a slow node or GPU, another device, slow or missing NICs, NVLinks that are down."""
    made = (
        st.fixed_dictionaries({"nodes": SPANS, "speed": st.sampled_from((0.5, 0.9))}),
        st.fixed_dictionaries({"nodes": SPANS, "gpus": SPANS, "speed": st.sampled_from((0.6, 0.95))}),
        st.fixed_dictionaries({"nodes": SPANS, "device": st.sampled_from(("a100-sxm4-80gb", "h200"))}),
        st.fixed_dictionaries({"nodes": SPANS, "num_nics": st.just(1)}),
        st.fixed_dictionaries({"nodes": SPANS, "nic_bytes_per_s": st.just(12.5e9)}),
        st.fixed_dictionaries({"nodes": SPANS, "gpus": SPANS, "intra_bytes_per_s": st.just(225e9)}),
    )
    return draw(st.lists(st.one_of(*made), min_size=1, max_size=2))


def uneven(given: list[dict[str, Any]]) -> Cluster | None:
    """Four nodes of four; None where the exceptions contradict each other."""
    cluster = Cluster.synthesise("H100", 16, 4)
    data = {name: getattr(cluster, name) for name in Cluster.model_fields}
    try:
        return Cluster.parse(data | {"exceptions": given}, "drawn", ClusterError)
    except ClusterError:
        return None


def lowered(fields: dict[str, Any], cluster: Cluster) -> Lowering:
    plan = Plan.model_validate({"seq_len": 512, "stack": "torchtitan-2024-compiled"} | fields)
    calibration = Calibration.datasheet(cluster.device)
    return lower(
        MODEL if plan.ep == 1 else MIXTURE, plan, cluster, Stack.load(plan.stack), calibration, default_curves()
    )


@examples(40, ci=20)
@given(fields=st.sampled_from(LAYOUTS), given=exceptions())
def test_folded_equals_every_rank(fields: dict[str, Any], given: list[dict[str, Any]]) -> None:
    cluster = uneven(given)
    if cluster is None:
        return
    lowering = lowered(fields, cluster)
    folded, full = play(lowering), play(lowering, fold=False)
    assert folded.step_s == pytest.approx(full.step_s, rel=1e-9)
    if lowering.rank_classes is None:  # the exceptions say what all GPUs are anyway
        return
    for rank_class in lowering.rank_classes.classes if folded.num_played == full.num_played else ():
        alone = full.timeline.breakdown(f"rank{rank_class.rank}")
        for name, seconds in folded.timeline.breakdown(rank_class.name).items():
            assert seconds == pytest.approx(alone.get(name, 0), rel=1e-6, abs=1e-9 * full.step_s)


@examples(40, ci=20)
@given(fields=st.sampled_from(LAYOUTS), given=exceptions())
def test_classes_cover_the_ranks_and_their_programs_meet(fields: dict[str, Any], given: list[dict[str, Any]]) -> None:
    cluster = uneven(given)
    lowering = lowered(fields, cluster) if cluster is not None else None
    if lowering is None or lowering.rank_classes is None:
        return
    seats = lowering.rank_classes.classes
    assert sum(rank_class.num_ranks for rank_class in seats) == 16
    stages = Counter[int]()
    for rank_class in seats:
        stages[rank_class.stage] += rank_class.num_ranks
    assert set(stages.values()) == {16 // lowering.plan.pp}
    check(lowering.programs(2))


@examples(40, ci=20)
@given(fields=st.sampled_from(LAYOUTS), given=exceptions())
def test_bounds_hold_and_breakdowns_are_the_step(fields: dict[str, Any], given: list[dict[str, Any]]) -> None:
    cluster = uneven(given)
    if cluster is None:
        return
    played = play(lowered(fields, cluster))
    slack = 1e-9 * played.step_s
    assert played.lower_s - slack <= played.step_s <= played.upper_s + slack
    for seconds in (played.breakdown, *played.kinds.values()):
        assert sum(seconds.values()) == pytest.approx(played.step_s, rel=1e-9)
        assert all(part >= -slack for part in seconds.values())
