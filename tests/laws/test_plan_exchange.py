"""What is written in another framework's words is read back to the same plan, or refused with every field."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from simulator.base.errors import PlanError
from simulator.formats.exchange import FORMATS, Job, effective_fields, export_plan
from simulator.formats.readers.plans import plan_fields, read_plan
from simulator.parallel.legality import check
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from tests.examples import examples

MODEL = Model.load("llama3-8b")
powers = st.sampled_from((1, 2, 4))
counts = st.integers(1, 6)


def _common(draw: st.DrawFn) -> dict[str, Any]:
    return {"micro_batch_size": draw(counts), "num_micro_batches": draw(counts), "seq_len": 1024 * draw(counts)}


def _fp8(draw: st.DrawFn, precision: str, recipes: tuple[str, ...], *, gathers: bool) -> dict[str, Any]:
    if precision != "fp8":
        return {}
    recipe = draw(st.sampled_from((None, *recipes)))
    return {
        "fp8_recipe": recipe,
        "fp8_all_gather": gathers and recipe not in ("mxfp8", "rowwise", "blockwise") and draw(st.booleans()),
    }


@st.composite
def megatron_plans(draw: st.DrawFn) -> Plan:
    zero, precision = draw(st.sampled_from((0, 1, 3))), draw(st.sampled_from(("bf16", "fp16", "fp8", "nvfp4", "fp32")))
    tp, pp, cp = draw(powers), draw(powers), draw(powers)
    fields = _common(draw)
    if pp > 1 and draw(st.booleans()):
        fields |= {"virtual_stages": 2, "num_micro_batches": pp * draw(counts)}
    elif pp == 2 and draw(st.booleans()):
        fields |= draw(
            st.sampled_from(
                (
                    {"first_stage_layers": 14},
                    {"stage_layers": (17, 15)},
                    {"last_stage_layers": 9},
                    {"embedding_as_layer": True, "head_as_layer": True},
                )
            )
        )
    ends = draw(st.integers(0, 3)) if precision in ("fp8", "nvfp4") else 0
    fields |= {"first_layers_bf16": ends, "last_layers_bf16": ends // 2}
    narrow = draw(st.booleans())
    wide = {"bf16": "fp32", "fp8": "fp32", "nvfp4": "fp32", "fp16": "fp32", "fp32": None}[precision]
    same = {"bf16": "bf16", "fp8": "bf16", "nvfp4": "bf16", "fp16": "fp16", "fp32": None}[precision]
    return Plan(
        data_parallel="megatron",
        zero=zero,
        dp_shard=draw(powers) if zero else 1,
        dp_replicate=draw(powers),
        tp=tp,
        pp=pp,
        cp=cp,
        cp_exchange=draw(st.sampled_from(("ring", "all_to_all"))),
        sequence_parallel=draw(st.booleans()),
        precision=precision,
        **_fp8(draw, precision, ("delayed", "tensorwise", "blockwise", "mxfp8"), gathers=zero == 1 and not ends),
        reduce_dtype=same if narrow else wide,
        optimizer=draw(st.sampled_from(("adamw", "sgd", "sgd_momentum"))),
        optimizer_dtype=draw(st.sampled_from(("fp32", "bf16"))),
        recompute=draw(st.sampled_from(("none", "full", "selective"))),
        cuda_graphs=draw(
            st.sampled_from(((), ("attn",), ("attn", "mlp"), ("moe_router", "moe_preprocess"), ("full_iteration",)))
        ),
        **fields,
    )


@st.composite
def deepspeed_plans(draw: st.DrawFn) -> Plan:
    zero = draw(st.integers(0, 3))
    offload: dict[str, Any] = {}
    if zero and draw(st.booleans()):
        offload["optimizer"] = draw(st.sampled_from(("host", "nvme"))) if zero == 3 else "host"
        offload |= {"pinned": draw(st.booleans()), "overlap": draw(st.booleans()), "buffer_count": 4 + draw(counts)}
        offload["parameters"] = draw(st.sampled_from(("none", "host"))) if zero == 3 else "none"
        offload["sub_group_numel"] = 10**6 * draw(counts)
    hierarchy: dict[str, Any] = {"tp": draw(powers), "cp": draw(powers)}
    if zero == 3 and not offload and draw(st.booleans()):
        near = {"quantized_weights": draw(st.booleans()), "secondary_ranks": draw(st.sampled_from((1, 2)))}
        hierarchy = {"zeropp": {**near, "quantized_gradients": True}, "dp_shard": 4}
    elif zero == 3 and draw(st.booleans()):
        hierarchy |= {"dp_replicate": 2, "hierarchical_gather": draw(st.booleans())}
    return Plan(
        data_parallel="deepspeed",
        zero=zero,
        vocab_parallel=False,
        cp_exchange="all_to_all",
        precision=draw(st.sampled_from(("bf16", "fp16", "fp32"))),
        reduce_dtype=draw(st.sampled_from((None, "fp32", "bf16"))),
        optimizer="adamw"
        if offload
        else draw(st.sampled_from(("adamw", "adam", "sgd", "sgd_momentum", "adam8bit", "lion"))),
        optimizer_impl=draw(st.sampled_from(("fused", "foreach"))),
        reduce_bucket_numel=10**6 * draw(counts),
        prefetch_bucket_numel=10**5 * draw(counts),
        param_persistence_numel=10**4 * draw(counts),
        recompute=draw(st.sampled_from(("none", "full", "selective"))),
        offload=offload,
        **_common(draw),
        **({"dp_shard": draw(powers)} if zero else {"dp_replicate": draw(powers)}) | hierarchy,
    )


@st.composite
def torchtitan_plans(draw: st.DrawFn) -> Plan:
    tp, pp, cp = draw(powers), draw(powers), draw(powers)
    fields = _common(draw)
    if pp > 1:
        schedule = draw(st.sampled_from(("gpipe", "1f1b", "interleaved", "dualpipe_v")))
        chunks = 2 if schedule in ("interleaved", "dualpipe_v") else 1
        # torch's stages reduce with the last micro-batch, and torchtitan keeps blocks gathered in a pipeline
        fields |= {"schedule": schedule, "virtual_stages": chunks, "sync_every_micro_batch": False}
        fields["num_micro_batches"] = 2 * pp * draw(counts)
    keeps = draw(st.sampled_from((True, False) if pp > 1 else (None, True, False)))
    offload = {"optimizer": "host", "parameters": "host"} if draw(st.booleans()) else {}
    precision = draw(st.sampled_from(("bf16", "fp32", "fp8")))
    return Plan(
        **_fp8(draw, precision, ("tensorwise", "rowwise", "mxfp8"), gathers=True),
        data_parallel="fsdp2",
        zero=3,
        dp_shard=draw(st.sampled_from((2, 4, 8))),
        dp_replicate=draw(powers),
        tp=tp,
        pp=pp,
        cp=cp,
        sequence_parallel=tp > 1,
        precision=draw(st.sampled_from(("bf16", "fp32", "fp8"))),
        reduce_dtype=draw(st.sampled_from((None, "fp32"))),
        master_dtype=draw(st.sampled_from(("fp32", "bf16"))),
        optimizer=draw(st.sampled_from(("adamw", "adam"))),
        optimizer_impl=draw(st.sampled_from(("fused", "foreach", "loop"))),
        recompute=draw(st.sampled_from(("none", "full", "selective", "every_k"))),
        recompute_every=draw(counts),
        reshard_after_forward=keeps,
        offload=offload,
        **fields,
    )


@st.composite
def accelerate_plans(draw: st.DrawFn) -> Plan:
    kind = draw(st.sampled_from(("fsdp1", "fsdp2", "deepspeed")))
    precision = draw(st.sampled_from(("bf16", "fp16", "fp32")))
    fields = _common(draw) | {"data_parallel": kind, "precision": precision}
    if kind == "deepspeed":
        zero = draw(st.integers(0, 3))
        fields |= {"zero": zero, "recompute": draw(st.sampled_from(("none", "full", "selective")))}
        return Plan(**fields, **{"dp_shard" if zero else "dp_replicate": draw(powers)})
    fields |= {"recompute": draw(st.sampled_from(("none", "full"))), "sync_every_micro_batch": False}
    fields["reduce_dtype"] = precision
    if kind == "fsdp1":
        zero = draw(st.sampled_from((0, 2, 3)))
        fields |= {
            "zero": zero,
            "forward_prefetch": draw(st.integers(0, 1)),
            "backward_prefetch": draw(st.integers(0, 1)),
        }
        # a hybrid shards over the GPUs of a machine, of which there are 8
        shards = {"dp_replicate": draw(powers)} if zero == 0 else {"dp_shard": 8, "dp_replicate": draw(powers)}
        return Plan(**fields, **shards)
    fields |= {"zero": 3, "dp_shard": draw(powers), "dp_replicate": draw(powers), "reshard_after_forward": draw(
        st.sampled_from((None, False)))}  # fmt: skip
    tp = draw(powers)
    return Plan(**fields, tp=tp, vocab_parallel=False, cp=draw(powers))


@st.composite
def own_plans(draw: st.DrawFn) -> Plan:
    return draw(st.one_of(megatron_plans(), deepspeed_plans(), torchtitan_plans(), accelerate_plans()))


REALMS = {
    "megatron": megatron_plans(),
    "deepspeed": deepspeed_plans(),
    "torchtitan": torchtitan_plans(),
    "accelerate": accelerate_plans(),
    "toml": own_plans(),
}


def job(plan: Plan) -> Job:
    return Job(plan=plan, model=MODEL, stack=Stack.load("megatron-core-2025"), gpus_per_node=8)


def read_again(text: str, form: str, plan: Plan, beside: dict[str, Any]) -> Plan:
    """By the public door, as a file whose format is told by its content."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan"
        file.write_text(text)
        draft = read_plan(file, given=beside)
        assert draft.format == form
        return Plan.model_validate(plan_fields(draft, plan.num_devices, beside, MODEL))


@st.composite
def exported(draw: st.DrawFn) -> tuple[str, Plan]:
    form = draw(st.sampled_from(sorted(REALMS)))
    return form, draw(REALMS[form])


@st.composite
def expert_plans(draw: st.DrawFn) -> Plan:
    """Mixtures of experts in Megatron."""
    tp = draw(powers)
    fields: dict[str, Any] = {"ep": draw(powers), "etp": draw(st.sampled_from((1, tp))), "tp": tp, "dp_shard": 8}
    fields |= {"expert_capacity_factor": draw(st.sampled_from((None, 1.25))), "pp": draw(powers), "zero": 1}
    fields |= {"virtual_stages": draw(st.sampled_from((1, 2))) if fields["pp"] > 1 else 1, "num_micro_batches": 4}
    overlaps = fields["ep"] > 1 and (fields["pp"] == 1 or fields["virtual_stages"] > 1)
    fields["expert_overlap"] = overlaps and draw(st.booleans())
    order = draw(st.sampled_from(("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")))
    return Plan(**fields, data_parallel="megatron", reduce_dtype="fp32", rank_order=order)


MIXTURE = Model.load("mixtral-8x7b")


@given(expert_plans())
@examples(60)
def test_mixtures_of_experts_are_kept(plan: Plan) -> None:
    assume(legal(plan))
    written = export_plan(
        Job(plan=plan, model=MIXTURE, stack=Stack.load("megatron-core-2025"), gpus_per_node=8), "megatron"
    )
    back = read_again(written.text, "megatron", plan, {})
    assert effective_fields(back, MIXTURE) == effective_fields(plan, MIXTURE)
    assert (back.ep, back.experts.etp, back.experts.capacity_factor) == (
        plan.ep,
        plan.experts.etp,
        plan.experts.capacity_factor,
    )


def legal(plan: Plan) -> bool:
    try:
        check(plan)
    except PlanError:
        return False
    return True


@given(exported())
@examples(150, ci=75)
def test_a_format_keeps_every_plan_of_its_realm(case: tuple[str, Plan]) -> None:
    form, plan = case
    assume(legal(plan))
    written = export_plan(job(plan), form)
    back = read_again(written.text, form, plan, dict(written.beside))
    assert effective_fields(back, MODEL) == effective_fields(plan, MODEL)


@given(own_plans(), st.sampled_from(FORMATS))
@examples(150, ci=75)
def test_any_plan_is_kept_or_refused(plan: Plan, form: str) -> None:
    assume(legal(plan))
    try:
        written = export_plan(job(plan), form)
    except PlanError:  # with the fields: tests/unit/test_cli_export.py
        return
    back = read_again(written.text, form, plan, dict(written.beside))
    assert effective_fields(back, MODEL) == effective_fields(plan, MODEL)


@given(own_plans())
@examples(50)
def test_what_is_written_is_the_same_every_time(plan: Plan) -> None:
    assume(legal(plan))
    assert export_plan(job(plan), "toml").text == export_plan(job(plan), "toml").text
