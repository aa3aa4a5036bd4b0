"""What each training framework runs of a plan: whose data parallelism, which habits it has, and what it has no words for.

Versions are those of the readers and writers in `simulator.formats`, from which the facts were taken: DeepSpeed 0.18,
Megatron-LM core 0.14, torchtitan 0.2. Megatron-DeepSpeed's pipelines are DeepSpeed's (runtime/pipe/engine.py: 1F1B, and
no ZeRO above stage 1). A training script of one's own may run whatever PyTorch and packages on it have: no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from simulator.parallel.legality.rule import Hosted, SoftwareRule
from simulator.spec.plan import Plan

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """A value that a framework gives a field, where the plan states no other. when: asked of the degrees and what is sharded."""

    field: str
    value: Any
    when: Callable[[Fields], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """A training framework.

    words: any of them in `Stack.framework` names it. implementations: whose data parallelism it runs, as the search tries
    them. title: what its plans' reader calls it.
    """

    name: str
    title: str
    words: tuple[str, ...]
    implementations: tuple[str, ...]
    habits: tuple[Habit, ...] = ()


def _in_stages(fields: Fields) -> bool:
    return bool(fields["pp"] > 1)


MEGATRON_DEEPSPEED: Final = Software(
    name="megatron-deepspeed",
    title="Megatron-DeepSpeed",
    words=("Megatron-DeepSpeed", "GPT-NeoX"),
    implementations=("deepspeed",),
)
DEEPSPEED: Final = Software(
    name="deepspeed",
    title="DeepSpeed 0.18",
    words=("DeepSpeed",),
    implementations=("deepspeed",),
    habits=(
        Habit(field="cp_exchange", value="all_to_all", when=lambda fields: bool(fields["cp"] > 1)),
        Habit(field="vocab_parallel", value=False, when=lambda fields: bool(fields["tp"] > 1)),
    ),
)
MEGATRON: Final = Software(
    name="megatron", title="Megatron-LM core 0.14", words=("Megatron", "NeMo"), implementations=("megatron",)
)
TORCHTITAN: Final = Software(
    name="torchtitan",
    title="torchtitan 0.2",
    words=("torchtitan",),
    implementations=("fsdp2",),
    habits=(  # torch's stages reduce with the last micro-batch, and torchtitan gathers blocks again in a pipeline
        Habit(field="sync_every_micro_batch", value=False, when=_in_stages),
        Habit(
            field="reshard_after_forward", value=True, when=lambda fields: _in_stages(fields) and fields["zero"] == 3
        ),
    ),
)
FSDP1: Final = Software(name="fsdp1", title="FSDP1", words=("FSDP1",), implementations=("fsdp1",))
TORCH: Final = Software(name="torch", title="PyTorch", words=("",), implementations=("ddp", "zero_redundancy", "fsdp2"))
ALL: Final = (MEGATRON_DEEPSPEED, DEEPSPEED, MEGATRON, FSDP1, TORCHTITAN, TORCH)  # the first whose word occurs


@lru_cache(maxsize=256)
def software_of(framework: str, implementation: str | None = None) -> Software:
    """The framework that a stack names; of an implementation that it does not have, the one that has it."""
    named = next(each for each in ALL if any(word in framework for word in each.words))
    if implementation is None or implementation in named.implementations:
        return named
    return {"deepspeed": DEEPSPEED, "megatron": MEGATRON}.get(implementation, named)


def text_of(value: object) -> str:
    """A value as a file would have it."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def refusal(title: str, field: str, wanted: object, got: object) -> tuple[str, str]:
    """What is reported of a field that a framework would run otherwise: the equation and the remedy."""
    return f"{title} cannot keep {field} = {text_of(wanted)}", f"{field} = {text_of(got)} is what it would run"


def _keeps(
    where: str,
    *,
    by: tuple[Software, ...],
    fields: tuple[str, ...],
    holds: Callable[[Plan], bool],
    runs: Callable[[Plan], object],
    stated: Callable[[Plan], object] | None = None,
) -> SoftwareRule:
    """Frameworks that do not have all values of a field. runs: what they would run instead. stated: the plan's value."""
    names, value = frozenset(each.name for each in by), stated or (lambda plan: plan.value(where))

    def words(hosted: Hosted) -> tuple[str, str]:
        return refusal(hosted.software.title, where, value(hosted.plan), runs(hosted.plan))

    return SoftwareRule(
        where=where,
        by=names,
        fields=fields,
        applies=lambda hosted: hosted.software.name in names,
        holds=lambda hosted: holds(hosted.plan),
        equation=lambda hosted: words(hosted)[0],
        remedy=lambda hosted: words(hosted)[1],
    )


def _own_order(plan: Plan) -> str:
    """Megatron-LM interleaves where stages are virtual."""
    return "interleaved" if plan.pipeline.virtual_stages > 1 else "1f1b"


_SCHEDULE: Final = ("pp", "schedule", "virtual_stages")
_TITAN_SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "dualpipe_v")

SOFTWARE: Final = (
    _keeps(
        "pp",  # DeepSpeed's pipelines are modules of a program, no part of its configuration
        by=(DEEPSPEED,),
        fields=("pp",),
        holds=lambda plan: plan.pp == 1,
        runs=lambda _: 1,
    ),
    _keeps(
        "ep",  # nor are its layers of experts
        by=(DEEPSPEED,),
        fields=("ep",),
        holds=lambda plan: plan.ep == 1,
        runs=lambda _: 1,
    ),
    _keeps(
        "zero",
        by=(MEGATRON_DEEPSPEED,),
        fields=("pp", "zero"),
        holds=lambda plan: plan.pp == 1 or plan.zero < 2,
        runs=lambda _: 1,
    ),
    _keeps(
        "schedule",
        by=(MEGATRON_DEEPSPEED,),
        fields=_SCHEDULE,
        holds=lambda plan: plan.pp == 1 or plan.pipeline_schedule == "1f1b",
        runs=lambda _: "1f1b",
        stated=lambda plan: plan.pipeline_schedule,
    ),
    _keeps(
        "schedule",
        by=(MEGATRON,),
        fields=_SCHEDULE,
        holds=lambda plan: plan.pp == 1 or plan.pipeline_schedule == _own_order(plan),
        runs=_own_order,
        stated=lambda plan: plan.pipeline_schedule,
    ),
    _keeps(
        "schedule",
        by=(TORCHTITAN,),
        fields=_SCHEDULE,
        holds=lambda plan: plan.pp == 1 or plan.pipeline_schedule in _TITAN_SCHEDULES,
        runs=lambda _: "1f1b",
        stated=lambda plan: plan.pipeline_schedule,
    ),
    _keeps(
        "sequence_parallel",
        by=(DEEPSPEED, MEGATRON_DEEPSPEED),
        fields=("tp", "sequence_parallel"),
        holds=lambda plan: plan.tp == 1 or not plan.sequence_parallel,
        runs=lambda _: False,
    ),
    _keeps(
        "sequence_parallel",
        by=(TORCHTITAN,),
        fields=("tp", "sequence_parallel"),
        holds=lambda plan: plan.tp == 1 or plan.sequence_parallel,
        runs=lambda _: True,
    ),
    _keeps(
        "vocab_parallel",
        by=(DEEPSPEED,),
        fields=("tp", "vocab_parallel"),
        holds=lambda plan: plan.tp == 1 or not plan.vocab_parallel,
        runs=lambda _: False,
    ),
    _keeps(
        "cp_exchange",
        by=(DEEPSPEED,),
        fields=("cp", "cp_exchange"),
        holds=lambda plan: plan.cp == 1 or plan.cp_exchange == "all_to_all",
        runs=lambda _: "all_to_all",
    ),
    _keeps("cp", by=(MEGATRON_DEEPSPEED,), fields=("cp",), holds=lambda plan: plan.cp == 1, runs=lambda _: 1),
    _keeps(
        "dp_replicate",  # groups that shard by themselves are MiCS, of stage 3
        by=(DEEPSPEED, MEGATRON_DEEPSPEED),
        fields=("zero", "dp_replicate"),
        holds=lambda plan: plan.zero in (0, 3) or plan.dp_replicate == 1,
        runs=lambda _: 1,
    ),
    _keeps(
        "data_parallel",  # without ranks to shard over there is no FSDP
        by=(TORCHTITAN,),
        fields=("implementation", "dp_shard", "cp"),
        holds=lambda plan: not plan.traits.shards_rows or plan.dp_shard * plan.cp > 1,
        runs=lambda _: "ddp",
        stated=lambda plan: plan.implementation,
    ),
    _keeps(
        "peft",  # no plan of theirs has words for adapters or frozen modules
        by=(DEEPSPEED, MEGATRON_DEEPSPEED, MEGATRON, TORCHTITAN),
        fields=("peft", "freeze_modules"),
        holds=lambda plan: not plan.peft.any,
        runs=lambda _: "none",
    ),
    _keeps(
        "offload.activations",
        by=(DEEPSPEED, MEGATRON_DEEPSPEED, MEGATRON, TORCHTITAN),
        fields=("offload",),
        holds=lambda plan: plan.offload.activations == "none",
        runs=lambda _: "none",
    ),
)
