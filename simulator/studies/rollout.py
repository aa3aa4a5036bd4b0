"""Reinforcement learning as a plan of plans: answers from a serving engine, then training on them, then new weights there.

One iteration of GRPO: every prompt gets some answers, all at once; the policy's and a reference's log-probabilities of them; the
steps that train on them; the new weights for the engine. With a critic (PPO) a second model of the same size is run and trained
beside the policy. Rewards come from a function and take no time, or from a model as large as the policy, one forward. Answers to one prompt share no cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from simulator.base.errors import Fault, InputError
from simulator.base.kernels import DTYPE_BYTES
from simulator.base.schema import Strict, read_toml
from simulator.parallel.mesh import GroupShape
from simulator.predict import Prediction
from simulator.predict.lengths import padding_of
from simulator.predict.reference import check_reference, forward_s, predict_base, reference_bytes
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.serving import InferencePlan, Serving, Workload, serve, with_defaults
from simulator.studies.serving.workload import Lengths
from simulator.work.collectives import choose
from simulator.work.parameters import trained_numel

_PLACE: Final = "--rollout"


class Rollout(Strict):
    """A rollout as it is written."""

    prompts: int = Field(ge=1, le=10**6, description="of an iteration")
    samples: int = Field(ge=1, le=10**4, default=8, description="answers a prompt")
    prompt_tokens: Lengths = 512
    output_tokens: Lengths = 1024
    seed: int = Field(ge=0, le=2**63, default=0, description="of the lengths")
    epochs: int = Field(ge=1, le=100, default=1, description="how often the answers are trained on")
    reference: Literal["none", "model", "base"] = Field(default="none", description="as `--reference`")
    reward: Literal["none", "model"] = Field(
        default="none", description="a model scores the answers, as large as the policy"
    )
    critic: bool = Field(default=False, description="PPO: a value model as large as the policy")
    engine: Literal["sleeps", "stays", "apart"] = Field(
        default="sleeps",
        description="on the same GPUs, and gone while they train (vLLM's sleep mode); or there all the time; or on a cluster "
        "of its own",
    )
    ahead: bool = Field(
        default=False, description="apart: answers of the next iteration are made meanwhile (off-policy by one)"
    )
    cluster: str | None = Field(default=None, description="apart: the engine's")
    inference: InferencePlan = InferencePlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """Time of an iteration, and a GPU's memory in both of its parts.

    log_probs_s: of the policy before the first step, where there are several. generating_bytes: with the states of the
    training that stay; training_bytes: with the engine, where it stays.
    """

    sequences: int
    steps: int
    output_tokens: int
    generate_s: float
    log_probs_s: float
    reference_s: float
    reward_s: float
    train_s: float
    sync_s: float
    overlaps: bool
    generating_bytes: int
    training_bytes: int
    capacity_bytes: int

    @property
    def iteration_s(self) -> float:
        """All of it, one after another; generating beside the rest where that is ahead."""
        rest = self.log_probs_s + self.reference_s + self.reward_s + self.train_s
        return (max(self.generate_s, rest) if self.overlaps else self.generate_s + rest) + self.sync_s

    @property
    def fits(self) -> bool:
        return max(self.generating_bytes, self.training_bytes) <= self.capacity_bytes

    def report(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {**asdict(self), "iteration_s": self.iteration_s, "fits": self.fits}


def read_rollout(path: Path) -> Rollout:
    """Raises InputError with every fault of the file."""
    return Rollout.parse(read_toml(path, InputError), str(path), InputError, from_file=True)


def iteration_of(
    rollout: Rollout,
    prediction: Prediction,
    model: Model,
    plan: Plan,
    cluster: Cluster,
    calibration: Calibration | None = None,
    stack: Stack | None = None,
) -> Iteration:
    """One iteration. prediction: of a training step under `plan`. Raises InputError with every fault."""
    sequences = rollout.prompts * rollout.samples
    load = Workload(
        rate=0,
        num_requests=sequences,
        prompt_tokens=rollout.prompt_tokens,
        output_tokens=rollout.output_tokens,
        seed=rollout.seed,
        warmup=0,
    )
    requests = load.requests(model.image_tokens)
    lengths = sorted(one.prompt_tokens + one.output_tokens for one in requests)
    if faults := list(_faults(rollout, plan, lengths[-1])):
        raise InputError(faults)
    steps = sequences * rollout.epochs // plan.global_batch_size
    where = Cluster.load(rollout.cluster, None) if rollout.cluster is not None else cluster
    engine = rollout.inference
    if engine.max_model_len is None:  # trl, verl and OpenRLHF ask their engine for prompts and answers, and no more
        engine = engine.model_copy(update={"max_model_len": plan.seq_len})
    engine = with_defaults(engine, Stack.of(engine), where.device, model)
    serving = serve(model, engine, where, requests, warmup=0.0)
    if serving.latencies is None:
        problem = f"the engine does not fit in memory: {serving.cause}"
        raise InputError.at(f"{_PLACE}: inference", problem, "more tp, or gpu_memory_utilization")
    padded = padding_of(lengths, model, plan, cluster, calibration, stack)
    once = forward_s(prediction) * plan.num_micro_batches * padded.step_s / prediction.step_s * steps / rollout.epochs
    models, of_reference = 2 if rollout.critic else 1, float(rollout.reference == "model")
    if rollout.reference == "base":  # without adapters
        of_reference = forward_s(predict_base(model, plan, cluster, calibration, stack)) / forward_s(prediction)
    return Iteration(
        sequences=sequences,
        steps=steps,
        output_tokens=sum(one.output_tokens for one in requests),
        generate_s=serving.latencies.latency.max_s,
        log_probs_s=once * (models if steps > 1 else models - 1),
        reference_s=once * of_reference,
        reward_s=once if rollout.reward == "model" else 0.0,
        train_s=models * steps * padded.step_s,
        sync_s=_sync_s(rollout, model, plan, cluster),
        overlaps=rollout.ahead,
        **_bytes(rollout, prediction, serving, model, plan),
    )


def _faults(rollout: Rollout, plan: Plan, longest: int) -> Iterator[Fault]:
    """What a rollout and a plan cannot be together."""
    total = rollout.prompts * rollout.samples * rollout.epochs
    if total % plan.global_batch_size:
        problem = f"{total} sequences are not whole steps of {plan.global_batch_size}"
        yield Fault(f"{_PLACE}: prompts", problem, f"a global batch of {gcd(total, plan.global_batch_size)}")
    if longest > plan.seq_len:
        problem = f"a prompt with its answer has {longest} tokens, the plan's sequences {plan.seq_len}"
        yield Fault(f"{_PLACE}: output_tokens", problem, f"seq_len = {longest}, or shorter ones")
    if (rollout.cluster is not None) != (rollout.engine == "apart"):
        yield Fault(f"{_PLACE}: cluster", "is that of an engine apart", 'engine = "apart" with a cluster')
    if rollout.ahead and rollout.engine != "apart":
        yield Fault(f"{_PLACE}: ahead", "the GPUs either answer or train", 'engine = "apart"')
    try:
        check_reference("model" if rollout.reference == "none" else rollout.reference, plan)
    except InputError as exc:
        yield from exc.faults


def _sync_s(rollout: Rollout, model: Model, plan: Plan, cluster: Cluster) -> float:
    """New weights, or adapters, whole on every GPU; to an engine apart over one NIC a GPU, each its part."""
    size = trained_numel(model, plan) * DTYPE_BYTES[plan.compute_dtype]
    shards = plan.dp_shard * plan.cp if plan.zero == 3 else 1
    seconds = 0.0
    if shards > 1:
        shape = GroupShape.of_neighbours(cluster, shards)
        seconds += float(choose("all_gather", size, shape, cluster).time_s)
    if rollout.engine == "apart":
        rails = cluster.gpus_per_node
        pair = GroupShape(num_ranks=2, num_nodes=2, ranks_per_node=1, num_groups_per_node=rails, spans_domain=True)
        seconds += float(choose("broadcast", -(-size // rails), pair, cluster.with_nodes(2)).time_s)
    return seconds


def _bytes(rollout: Rollout, prediction: Prediction, serving: Serving, model: Model, plan: Plan) -> dict[str, int]:
    """A GPU's memory during generation and during training; if separate, of the training GPUs."""
    memory, value_model = prediction.memory, prediction.memory.resident_bytes if rollout.critic else 0
    beside = reference_bytes(model, plan, "model") * ((rollout.reference == "model") + (rollout.reward == "model"))
    states, training = memory.resident_bytes + value_model + beside, memory.used_bytes + value_model + beside
    engine = serving.memory.used_bytes
    return {
        "generating_bytes": states + (engine if rollout.engine != "apart" else 0),
        "training_bytes": training + (engine if rollout.engine == "stays" else 0),
        "capacity_bytes": memory.capacity_bytes,
    }
