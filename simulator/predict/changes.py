"""Changes of a plan that lower its memory and train on the same tokens a step, in the order they are tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from simulator.spec.cluster import Cluster
from simulator.spec.plan import Plan
from simulator.spec.plan.traits import default_implementation
from simulator.spec.software.stack import Stack

_WHOLE_LOGITS = ("eager", "fp32_eager", "fp32_cast", "fp32_shifted", "shifted", "shifted_nll", "in_place")
_SHORTEST = 1024  # tokens of a sequence that is still cut in two
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Fields of the plan that change, in dotted names.

    kind: two changes of one kind do not add up. stack: fields of its software. nodes: times as many nodes. numerics: the
    results of training differ.
    """

    kind: str
    plan: dict[str, Any] = field(default_factory=dict)
    stack: dict[str, Any] = field(default_factory=dict)
    nodes: int = 1
    expandable: bool = False
    numerics: bool = False

    def __add__(self, other: Change) -> Change:
        return Change(
            kind=other.kind,
            plan={**self.plan, **other.plan},
            stack={**self.stack, **other.stack},
            nodes=self.nodes * other.nodes,
            expandable=self.expandable or other.expandable,
            numerics=self.numerics or other.numerics,
        )

    @property
    def key(self) -> frozenset[object]:
        """Equal for the same changes in another order."""
        return frozenset((*self.fields.items(), self.nodes, self.expandable))

    @property
    def fields(self) -> dict[str, Any]:
        """Of the plan, and of the stack as `--set` names them."""
        return self.plan | {f"stack.{name}": value for name, value in self.stack.items()}

    @property
    def words(self) -> str:
        """As on the command line."""
        parts = [f"{name} = {_word(value)}" for name, value in self.fields.items()]
        return ", ".join([*parts, *([EXPANDABLE] if self.expandable else [])])

    def applied(self, plan: Plan) -> Plan:
        """The changed plan. Raises ValueError where the change is none of a legal plan."""
        data = plan.model_dump() | {"sharding_strategy": None}
        for name, value in self.plan.items():
            *path, leaf = name.split(".")
            table = data
            for part in path:
                table = table[part]
            table[leaf] = value
        return Plan.model_validate(data)


EXPANDABLE_SEGMENTS = Change(kind="allocator", expandable=True)


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def changes(plan: Plan, cluster: Cluster, stack: Stack) -> Iterator[Change]:
    """Single changes, the usually cheapest first."""
    yield from _tuning(plan)
    if plan.peft.method != "none" and stack.kernels.loss in _WHOLE_LOGITS:  # Liger's kernel, a flag of trainers
        yield Change(kind="loss", stack={"loss": "fused_linear"})
    yield from _optimizer(plan)
    yield from _sharding(plan)
    yield from _micro_batches(plan)
    yield from _recompute(plan)
    yield from _sequence(plan)
    yield from _tensors(plan, cluster)
    yield from _offload(plan)
    yield from _more_nodes(plan, cluster)


def _optimizer(plan: Plan) -> Iterator[Change]:
    if plan.optimizer.impl != "fused" and plan.optimizer.kind in ("adam", "adamw"):
        yield Change(kind="implementation", plan={"optimizer_impl": "fused"})
    compute = plan.compute_dtype
    if plan.gradient_dtype == "fp32" and compute != "fp32" and plan.zero >= 2:
        yield Change(kind="reduce", plan={"reduce_dtype": compute}, numerics=True)
    if plan.optimizer.kind in ("adam", "adamw"):
        kind = "torchao_adam8bit" if plan.traits.shards_rows else "adam8bit"  # bitsandbytes takes no DTensors
        yield Change(kind="optimizer", plan={"optimizer": kind}, numerics=True)
        if plan.peft.method == "full" and plan.traits.whole_modules:
            yield Change(kind="optimizer", plan={"optimizer": "paged_adam8bit"}, numerics=True)


def _tuning(plan: Plan) -> Iterator[Change]:
    """Where a model is fine-tuned: adapters instead of its weights, 4-bit weights below adapters, sequences cut in two."""
    method, base = plan.peft.method, plan.peft.stored
    if method == "full":
        yield Change(kind="adapters", plan={"peft": "lora"}, numerics=True)
    if method == "full" or (method == "lora" and base in ("compute", "fp32")):
        yield Change(kind="4-bit adapters", plan={"peft": "qlora"}, numerics=True)
    if plan.peft.pairs and plan.peft.targets == ("all",):
        yield Change(kind="fewer adapters", plan={"lora_targets": ("attention",)}, numerics=True)
    if method != "none" and plan.seq_len % 2 == 0 and plan.seq_len >= _SHORTEST:
        halves = {"seq_len": plan.seq_len // 2, "num_micro_batches": plan.num_micro_batches * 2}
        yield Change(kind="shorter sequences", plan=halves, numerics=True)


def degrees_on(plan: Plan, num_devices: int) -> dict[str, int]:
    """The plan's data-parallel degrees on that many devices, with unchanged shard groups and other degrees."""
    ranks = num_devices // (plan.tp * plan.cp * plan.pp)
    if plan.dp_replicate > 1:
        return {"dp_replicate": ranks // plan.dp_shard, "dp_shard": plan.dp_shard}
    return {"dp_replicate": plan.dp_replicate, "dp_shard": ranks}


def _sharding(plan: Plan) -> Iterator[Change]:
    ranks = plan.num_data_parallel
    if plan.zero < 3 and ranks > 1:
        alone: dict[str, object] = {"comm_hook.kind": "none"} if plan.ddp.comm_hook.kind != "none" else {}  # of DDP
        alone |= {"sync_every_steps": 1, "outer_optimizer": "average"} if plan.sync_every_steps > 1 else {}
        alone |= {"one_bit.kind": "none"} if plan.deepspeed.one_bit.any else {}
        if plan.data_parallel and 3 not in plan.traits.zero_stages:
            alone |= {"data_parallel": default_implementation(3)}
        yield Change(kind="shards", plan={"zero": 3, "dp_replicate": 1, "dp_shard": ranks, **alone})
    if plan.zero == 3 and plan.dp_replicate > 1:
        yield Change(kind="shards", plan={"dp_replicate": 1, "dp_shard": ranks})
    if plan.fsdp.reshard_after_forward is False or plan.reshard_ranks is not None:
        yield Change(kind="reshard", plan={"reshard_after_forward": True})
    if plan.sync_every_micro_batch is False and plan.zero >= 2:
        yield Change(kind="sync", plan={"sync_every_micro_batch": True})


def _micro_batches(plan: Plan) -> Iterator[Change]:
    """Smaller micro-batches, more of them: half, and one sequence each."""
    size = plan.micro_batch_size
    for smaller in dict.fromkeys((size // 2, 1)):
        if 0 < smaller < size and size % smaller == 0:
            count = plan.num_micro_batches * (size // smaller)
            yield Change(kind="micro-batch", plan={"micro_batch_size": smaller, "num_micro_batches": count})


def _recompute(plan: Plan) -> Iterator[Change]:
    if plan.recompute.mode == "none":
        yield Change(kind="recompute", plan={"recompute": "selective"})
        yield Change(kind="recompute", plan={"recompute": "every_k", "recompute_every": 2})
    if plan.recompute.mode != "full":
        yield Change(kind="recompute", plan={"recompute": "full"})


def _sequence(plan: Plan) -> Iterator[Change]:
    """A sequence over several ranks instead of several sequences; more micro-batches keep the tokens of a step."""
    for factor in (2, 4):
        cp = plan.cp * factor
        if plan.micro_batch_size == 1 and plan.dp_shard % factor == 0 and plan.seq_len % (2 * cp) == 0:
            fields = {"cp": cp, "dp_shard": plan.dp_shard // factor}
            yield Change(kind="sequence", plan={**fields, "num_micro_batches": plan.num_micro_batches * factor})


def _tensors(plan: Plan, cluster: Cluster) -> Iterator[Change]:
    """Each block over several ranks of a node, its tokens too between products; as many tokens a step."""
    for factor in (2, 4, 8):
        tp = plan.tp * factor
        if plan.dp_shard % factor or tp > cluster.gpus_per_node or (plan.seq_len // plan.cp) % tp:
            continue
        fields = {"tp": tp, "sequence_parallel": True, "dp_shard": plan.dp_shard // factor}
        yield Change(kind="tensors", plan={**fields, "num_micro_batches": plan.num_micro_batches * factor})


def _offload(plan: Plan) -> Iterator[Change]:
    """Activations in host memory; the optimizer's state, or all states, which FSDP2 moves together; by DeepSpeed on one GPU."""
    if plan.offload.activations == "none":
        yield Change(kind="offloaded activations", plan={"offload.activations": "host"})
    if plan.offload.optimizer != "none":
        return
    both, traits = ("optimizer", "parameters"), plan.traits
    names = both if traits.offloads_units else both[:1] if traits.zero_engine else ()
    if names:
        yield Change(kind="offloaded states", plan={f"offload.{name}": "host" for name in names})
    elif plan.peft.method != "none" and plan.num_devices == 1 and plan.traits.whole_modules:
        engine = {"data_parallel": "deepspeed", "offload.optimizer": "host"}
        yield Change(kind="offloaded states", plan={**engine, "zero": 2})
        yield Change(kind="offloaded states", plan={**engine, "zero": 3, "offload.parameters": "host"})


def _more_nodes(plan: Plan, cluster: Cluster) -> Iterator[Change]:
    """Twice to eight times the shards; as many tokens a step where micro-batches can be spread."""
    if plan.zero < 2 or plan.num_devices != cluster.num_devices:
        return
    for factor in (2, 4, 8):
        fewer = {} if plan.num_micro_batches % factor else {"num_micro_batches": plan.num_micro_batches // factor}
        yield Change(kind="nodes", plan={"dp_shard": plan.dp_shard * factor, **fewer}, nodes=factor)
