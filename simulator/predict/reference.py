"""A reference model beside the one that is trained (DPO, KTO, PPO): one more forward of every micro-batch, nothing kept.

A batch of preferences has two sequences a pair, which micro_batch_size counts. The reference is a model of its own, stored as
it computes and sharded as the plan shards (trl's create_reference_model), or the base below adapters that are switched off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal, get_args

from simulator.base.errors import InputError
from simulator.base.kernels import DTYPE_BYTES
from simulator.base.schema import nearest
from simulator.predict import Prediction, predict
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.program import COMPUTE_STREAM

Kind = Literal["model", "base"]
KINDS: Final = get_args(Kind)
MOST_FORWARDS: Final = 64


def reference_of(text: str | None, plan: Plan, forwards: int) -> tuple[Kind, int] | None:
    """What --reference says, else what a trainer's file has: so many forwards. Raises InputError."""
    if text is None and forwards:
        text = f"{'base' if plan.peft.adds else 'model'}:{forwards}"
    return None if text in (None, "none") else check_forwards(text, plan)


def check_forwards(text: str, plan: Plan) -> tuple[Kind, int]:
    """`base:3` is the base, and three forwards of a micro-batch (KTO's). Raises InputError."""
    kind, colon, count = text.partition(":")
    if colon and not (count.isascii() and count.isdigit() and 1 <= int(count[:4]) <= MOST_FORWARDS):
        problem = f"{count[:20]!r} is no number of forwards"
        raise InputError.at("--reference", problem, f"{kind[:20]}:3, at most {MOST_FORWARDS}")
    return check_reference(kind, plan), int(count or 1)


def check_reference(kind: str, plan: Plan) -> Kind:
    """One of KINDS that a plan can have. Raises InputError."""
    if kind not in KINDS:
        problem, remedy = f"{kind[:60]!r} is no reference", nearest(kind, KINDS) or " or ".join(KINDS)
        raise InputError.at("--reference", problem, remedy)
    if kind == "base" and not plan.peft.adds:
        problem = "base is what adapters stand beside, and the plan has none"
        raise InputError.at("--reference", problem, "--reference model, or --peft lora")
    if plan.pp > 1 or plan.offload.parameters != "none":
        problem = "a reference in a pipeline, or in host memory, is not modelled"
        raise InputError.at("--reference", problem, "--pp 1, without offload.parameters; or --reference none")
    return "model" if kind == "model" else "base"


def reference_bytes(model: Model, plan: Plan, kind: Kind) -> int:
    """Bytes of the reference's weights on a GPU."""
    if kind == "base":
        return 0
    shards = plan.tp * (plan.dp_shard * plan.cp if plan.zero == 3 else 1)
    return -(-model.num_parameters // shards) * DTYPE_BYTES[plan.compute_dtype]


def predict_base(
    model: Model, plan: Plan, cluster: Cluster, calibration: Calibration | None = None, stack: Stack | None = None
) -> Prediction:
    """A plan whose adapters are off: as if the embedding alone had one, which no product reads."""
    method = "qlora" if plan.peft.method == "qlora" else "lora"
    off = plan.copy_with(peft=method, lora_targets=("embedding",), lora_dropout=0.0, mixed_units=False)
    return predict(model, off, cluster, calibration, stack)


def with_reference(
    prediction: Prediction,
    model: Model,
    plan: Plan,
    cluster: Cluster,
    calibration: Calibration | None = None,
    stack: Stack | None = None,
    *,
    kind: Kind,
    forwards: int = 1,
) -> Prediction:
    """The same step with the reference's forwards in front of the policy's, and its weights in memory.

    forwards: of each micro-batch. KTO has three: the reference's, and both models' on mismatched answers.
    """
    without_reference = predict_base(model, plan, cluster, calibration, stack) if kind == "base" else prediction
    further_s = forwards * forward_s(without_reference) * plan.num_micro_batches
    size, memory = reference_bytes(model, plan, kind), prediction.memory
    longer = (prediction.step_s + further_s) / prediction.step_s
    flop = model.model_flop_per_sequence(plan.attended_len) * plan.tokens_per_step // plan.attended_len // 3
    return replace(
        prediction,
        step_s=prediction.step_s + further_s,
        low_s=prediction.low_s * longer,
        high_s=prediction.high_s * longer,
        lower_s=prediction.lower_s + further_s,
        upper_s=prediction.upper_s * longer,
        hardware_flop_per_step=prediction.hardware_flop_per_step + forwards * flop,
        breakdown={**prediction.breakdown, "reference": further_s},
        memory=replace(
            memory,
            peak_allocated_bytes=memory.peak_allocated_bytes + size,
            peak_reserved_bytes=memory.peak_reserved_bytes + size,
            low_reserved_bytes=memory.low_reserved_bytes + size,
            high_reserved_bytes=memory.high_reserved_bytes + size,
            resident_bytes=memory.resident_bytes + size,
            by_category={**memory.by_category, **({"reference": size} if size else {})},
            pressure=None if size else memory.pressure,
        ),
    )


def forward_s(prediction: Prediction) -> float:
    """From the step's beginning to its first backward: a forward with what it waits for."""
    spans = (span for span in prediction.timeline.of() if span.stream == COMPUTE_STREAM)
    return next(float(span.start_s) for span in spans if span.label.startswith("backward"))
