"""What each training framework runs of a plan: whose data parallelism, which habits it has, and what it has no words for.

Versions are those of the readers and writers in `simulator.formats`, from which the facts were taken: DeepSpeed 0.18,
Megatron-LM core 0.14, torchtitan 0.2. Megatron-DeepSpeed's pipelines are DeepSpeed's (runtime/pipe/engine.py: 1F1B, and
no ZeRO above stage 1). A training script of one's own may run whatever PyTorch and packages on it have: no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
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
        applies=lambda hosted: hosted.software.name in names,
        holds=lambda hosted: holds(hosted.plan),
        equation=lambda hosted: words(hosted)[0],
        remedy=lambda hosted: words(hosted)[1],
    )


def _only(where: str, *, keeps: object, by: tuple[Software, ...], beside: str = "") -> SoftwareRule:
    """Frameworks that have one value of a field alone. beside: a degree; where it is 1, the field says nothing."""
    value, degree = attrgetter(where), attrgetter(beside or where)
    return _keeps(
        where,
        by=by,
        holds=lambda plan: bool(value(plan) == keeps or (beside and degree(plan) == 1)),
        runs=lambda _: keeps,
    )


def _schedules(
    by: Software, has: Callable[[Plan], bool], runs: Callable[[Plan], object] = lambda _: "1f1b"
) -> SoftwareRule:
    """A framework that does not have all schedules of a pipeline."""
    return _keeps(
        "schedule",
        by=(by,),
        holds=lambda plan: plan.pp == 1 or has(plan),
        runs=runs,
        stated=lambda plan: plan.pipeline_schedule,
    )


def _own_order(plan: Plan) -> str:
    """Megatron-LM interleaves where stages are virtual."""
    return "interleaved" if plan.pipeline.virtual_stages > 1 else "1f1b"


_TITAN_SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "dualpipe_v")
_EITHER_DEEPSPEED: Final = (DEEPSPEED, MEGATRON_DEEPSPEED)

SOFTWARE: Final = (
    _only(
        "pp", keeps=1, by=(DEEPSPEED,)
    ),  # DeepSpeed's pipelines are modules of a program, no part of its configuration
    _only("ep", keeps=1, by=(DEEPSPEED,)),  # nor are its layers of experts
    _keeps(
        "zero",
        by=(MEGATRON_DEEPSPEED,),
        holds=lambda plan: plan.pp == 1 or plan.zero < 2,
        runs=lambda _: 1,
    ),
    _schedules(MEGATRON_DEEPSPEED, lambda plan: plan.pipeline_schedule == "1f1b"),
    _schedules(MEGATRON, lambda plan: plan.pipeline_schedule == _own_order(plan), _own_order),
    _schedules(TORCHTITAN, lambda plan: plan.pipeline_schedule in _TITAN_SCHEDULES),
    _only("sequence_parallel", keeps=False, by=_EITHER_DEEPSPEED, beside="tp"),
    _only("sequence_parallel", keeps=True, by=(TORCHTITAN,), beside="tp"),
    _only("vocab_parallel", keeps=False, by=(DEEPSPEED,), beside="tp"),
    _only("cp_exchange", keeps="all_to_all", by=(DEEPSPEED,), beside="cp"),
    _only("cp", keeps=1, by=(MEGATRON_DEEPSPEED,)),
    _keeps(
        "dp_replicate",  # groups that shard by themselves are MiCS, of stage 3
        by=_EITHER_DEEPSPEED,
        holds=lambda plan: plan.zero in (0, 3) or plan.dp_replicate == 1,
        runs=lambda _: 1,
    ),
    _keeps(
        "data_parallel",  # without ranks to shard over there is no FSDP
        by=(TORCHTITAN,),
        holds=lambda plan: not plan.traits.shards_rows or plan.dp_shard * plan.cp > 1,
        runs=lambda _: "ddp",
        stated=lambda plan: plan.implementation,
    ),
    _keeps(
        "peft",  # no plan of theirs has words for adapters or frozen modules
        by=(*_EITHER_DEEPSPEED, MEGATRON, TORCHTITAN),
        holds=lambda plan: not plan.peft.any,
        runs=lambda _: "none",
    ),
    _only("offload.activations", keeps="none", by=(*_EITHER_DEEPSPEED, MEGATRON, TORCHTITAN)),
)
