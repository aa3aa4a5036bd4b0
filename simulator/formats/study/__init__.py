"""A study: what one prediction needs, from a TOML file, from flags, or from the embedded default.

Every value remembers who gave it, so that a fault is reported at the flag or the key that caused it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import ValidationError

from simulator.base.errors import Fault, InputError, StackError
from simulator.base.schema import Strict, faults_of, read_toml
from simulator.base.units import FROM_FILE
from simulator.formats.study.certain_faults import BY_DEVICES, certain_faults, plan_faults, unknown_fields
from simulator.formats.study.loading import calibration_named, calibration_of, cluster_of, model_of
from simulator.formats.study.overrides import Override, literal, parse_overrides, patched
from simulator.formats.study.provenance import (
    model_notes,
    of_model,
    of_stored_calibration,
    set_by_hand,
    sources_of,
    without_effect,
)
from simulator.formats.study.tables import (
    DEFAULT,
    DEFAULT_NAME,
    ROOTS,
    Faults,
    PlanFile,
    StudyFile,
    at_its_key,
    located,
    merged,
    of_root,
    relabelled,
)
from simulator.predict import Source
from simulator.predict.data_loading import DataLoading
from simulator.predict.energy import Energy
from simulator.predict.parameter_server import Servers
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.memory import USUAL_MEMORY
from simulator.spec.software.stack import Stack
from simulator.work.checkpoint import Checkpoint

if TYPE_CHECKING:
    from simulator.formats.readers.plans import Draft

T = TypeVar("T", bound=Strict)

__all__ = ["PlanFile", "Study", "calibration_named", "read_study"]


_OF_POOL: Final = tuple(flat for flat, place in Plan.flat_names.items() if place.startswith("memory."))
_OF_PEFT: Final = frozenset(
    (
        "optimizer_in_backward",
        "galore_rank",
        "wide_embedding",
        *(flat for flat, place in Plan.flat_names.items() if place.startswith("peft.")),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Everything predict() takes, and where it came from."""

    model: Model
    plan: Plan
    cluster: Cluster
    calibration: Calibration | None
    stack: Stack | None
    sources: tuple[Source, ...]
    checkpoint: Checkpoint | None = None
    data: DataLoading | None = None
    energy: Energy | None = None
    servers: Servers | None = None
    draft: Draft | None = None  # where the plan came from another framework's file
    notes: tuple[str, ...] = ()  # of the files: keys that have moved

    @property
    def parts(self) -> tuple[Model, Plan, Cluster, Calibration | None, Stack | None]:
        """What predict() takes, in its order."""
        return self.model, self.plan, self.cluster, self.calibration, self.stack

    def inputs(self) -> dict[str, Any]:
        """What was asked, as plain data for the JSON report."""
        return {
            "model": self.model.name,
            "cluster": self.cluster.name,
            "nodes": self.cluster.num_nodes,
            **({"seats": list(self.cluster.seats)} if self.cluster.seats else {}),
            "calibration": self.calibration.name if self.calibration else None,
            "plan": self._plan(),
            "imported": self.draft.report() if self.draft else None,
        }

    def _plan(self) -> dict[str, Any]:
        """The plan's fields; those of fine-tuning where something is frozen, those of the pool where one is asked for."""
        fields = self.plan.model_dump(mode="json") | {"stack": self.plan.software}
        tuned = self.plan.peft.method != "none" or self.plan.peft.any or self.plan.optimizer.in_backward
        tuned |= self.plan.optimizer.kind == "galore" or self.plan.optimizer.wide_embedding
        if self.plan.document_len is None:
            del fields["document_len"]
        if not self.plan.deepspeed.one_bit.any:
            del fields["one_bit"]
        sizes = ("shard_sizes", "shard_reserve_bytes", "shard_share")
        uneven = self.plan.fsdp.shard_sizes != "equal"
        fields = {name: value for name, value in fields.items() if uneven or name not in sizes}
        idle = (*(() if tuned else _OF_PEFT), *(_OF_POOL if self.plan.memory == USUAL_MEMORY else ()))
        return {name: value for name, value in fields.items() if name not in idle}


def read_study(
    file: Path | None,
    flags: Mapping[str, str],
    plan_flags: Mapping[str, str],
    settings: Sequence[str],
    plan_file: PlanFile | None = None,
) -> Study:
    """The study of `file` (None: the embedded default) under flags and `--set`s.

    flags: model, cluster, nodes, calibration as given. plan_flags: Plan's fields as given.
    plan_file: holds the plan, and perhaps the model, in place of the study's.
    Raises InputError with every fault of every input; with a plan's file also with a command line that works.
    """
    if plan_file is None:
        return _read_study(file, flags, plan_flags, settings, None)
    from simulator.formats.study.ready import Command, assumed_note, ready_command

    def attempt(command: Command) -> Study:
        return _read_study(command.file, command.flags, command.plan_flags, command.settings, command.plan_file)

    command = Command(file=file, flags=flags, plan_flags=plan_flags, settings=tuple(settings), plan_file=plan_file)
    try:
        study = attempt(command)
    except InputError as exc:
        found = ready_command(command, exc.faults, lambda command: attempt(command).draft)
        raise InputError(exc.faults, found) from None
    return replace(study, notes=(*study.notes, *assumed_note(command, study.draft)))


def _read_study(
    file: Path | None,
    flags: Mapping[str, str],
    plan_flags: Mapping[str, str],
    settings: Sequence[str],
    plan_file: PlanFile | None,
) -> Study:
    """The study itself."""
    faults = Faults()
    base = dict(DEFAULT) if file is None else faults.attempt(lambda: located(read_toml(file, InputError), file.parent))
    if base is None:
        raise InputError(faults)
    overrides, wrong = parse_overrides(settings, ROOTS)
    faults += wrong
    raw, origins = merged(base, flags, plan_flags, overrides, keep_plan=file is not None or "model" not in flags)
    given = {name: literal(text) for name, text in plan_flags.items()}
    draft = None
    if plan_file is not None:
        from simulator.formats.study.imported import model_and_cluster, read_draft

        draft = faults.attempt(lambda: read_draft(plan_file, {*given, *flags}))
        if draft is None:
            raise InputError(faults)
        raw = {**raw, **model_and_cluster(draft, flags, keep=file is not None)}
    model = faults.attempt(lambda: model_of(raw, of_root(overrides, "model"), draft))
    cluster = faults.attempt(lambda: cluster_of(raw, overrides, draft, given))
    if draft is not None:
        from simulator.formats.study.imported import with_draft

        stated = {*given, *(str(Plan.flat_path(o.path)[0]) for o in of_root(overrides, "plan"))}
        draft = draft.settled(stated, model, None if cluster is None else cluster.device)
        raw, origins, found = with_draft(raw, origins, draft, cluster, model, given, overrides)
        faults += found
    table = base.get("plan")
    merged_study = _Raw(
        name=str(file or DEFAULT_NAME),
        raw=raw,
        origins=origins,
        overrides=overrides,
        draft=draft,
        given=given,
        written=table if isinstance(table, dict) else {},
    )
    return _completed(merged_study, model, cluster, faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raw:
    """A study as plain data, with the origin of each value: the file, flags, `--set`s, another framework's file."""

    name: str
    raw: Mapping[str, Any]
    origins: Mapping[str, str]
    overrides: Sequence[Override]
    draft: Draft | None
    given: Mapping[str, Any]
    written: Mapping[str, Any]  # the plan's table as the file has it

    def notes(self, plan: Plan, model: Model) -> tuple[str, ...]:
        """Keys of the study's file and of the stack's that have moved; what the model's file leaves open."""
        found = Plan.moved_note(self.name, self.written, "plan.")
        if plan.stack.endswith(".toml"):
            found += Stack.moved_note(plan.stack, read_toml(Path(plan.stack), StackError))
        return (*found, *model_notes(model), *(self.draft.notes if self.draft else ()))


def _completed(study_data: _Raw, model: Model | None, cluster: Cluster | None, faults: Faults) -> Study:
    """The plan, its software and its checkpoint, judged. Raises InputError with every fault, those so far among them."""
    raw, overrides, draft = study_data.raw, study_data.overrides, study_data.draft
    settled = draft is None or not faults
    study, unknown = _checked(study_data, faults)
    calibration = faults.attempt(lambda: calibration_of(raw, cluster, of_root(overrides, "kernels")))
    stack = plan = None
    if study is not None:
        plan = completed = _with_precision(_with_degrees(study.plan, cluster), cluster)
        stack = faults.attempt(lambda: _stack_of(completed, study_data))
        if settled and not unknown:
            faults += plan_faults(completed, model, cluster, others=bool(faults))
        else:
            faults += _certain_faults(completed, model, cluster, unknown, study_data)
    checkpoint = _optional_table(Checkpoint, "checkpoint", study, overrides, faults)
    data = _optional_table(DataLoading, "data", study, overrides, faults)
    energy = _optional_table(Energy, "energy", study, overrides, faults)
    servers = _optional_table(Servers, "servers", study, overrides, faults)
    faults += _run_faults(raw, f"{study_data.name}: run")
    if faults or study is None or model is None or cluster is None or plan is None:
        raise InputError(dict.fromkeys(at_its_key(fault, study_data.origins, study_data.name) for fault in faults))
    sources = (
        *sources_of(study_data.name, raw, study_data.origins, study.plan, plan, draft),
        *of_model(model, raw.get("model")),
        *of_stored_calibration(raw, cluster.device.name),
        *set_by_hand(overrides),
    )
    if draft is None:  # whose reader reports its own
        sources += without_effect(study.plan, plan, model)
    return Study(
        model=model,
        plan=plan,
        cluster=cluster,
        calibration=calibration,
        stack=stack,
        sources=sources,
        checkpoint=checkpoint,
        data=data,
        energy=energy,
        servers=servers,
        draft=draft,
        notes=study_data.notes(plan, model),
    )


def _optional_table(
    noun: type[T], name: str, study: StudyFile | None, overrides: Sequence[Override], faults: Faults
) -> T | None:
    """A table of the file under its `--set`s, which ask for it too; None where neither does."""
    given, table = of_root(overrides, name), getattr(study, name, None)
    return faults.attempt(lambda: patched(table or noun(), given, InputError)) if table or given else None


def _run_faults(raw: Mapping[str, Any], place: str) -> list[Fault]:
    """Unknown keys of `[run]`; its values are judged by the verb that plays it, whose flags may replace them."""
    if not isinstance(raw.get("run"), dict):
        return []
    from simulator.studies.goodput.run import LongRun

    try:
        LongRun.parse(raw["run"], place, InputError, from_file=True)
    except InputError as exc:
        return [fault for fault in exc.faults if fault.problem == "unknown key"]
    return []


def _checked(study_data: _Raw, faults: list[Fault]) -> tuple[StudyFile | None, frozenset[str]]:
    """The study, and the plan's fields that cannot be read (missing in it); None: the plan cannot be checked."""
    raw = dict(study_data.raw)
    try:
        return StudyFile.model_validate(raw, context=FROM_FILE), frozenset()
    except ValidationError as exc:
        name, details = study_data.draft.file if study_data.draft else study_data.name, exc.errors(include_url=False)
        found = faults_of(exc, "", StudyFile, raw)
        faults += [relabelled(fault, study_data.origins, name, study_data.written) for fault in found]
    unknown = unknown_fields(details)
    if unknown is None:
        return None, frozenset()
    wrong = {str(Plan.flat_path(detail["loc"][1:])[0]) for detail in details if detail["loc"][0] == "plan"}
    rest = {"plan": {key: value for key, value in raw["plan"].items() if key not in wrong}}
    try:
        return StudyFile.model_validate({"model": "", "cluster": "", **rest}, context=FROM_FILE), unknown
    except ValidationError:  # what is left contradicts itself: reported when the rest is right
        return None, frozenset()


def _stack_of(plan: Plan, study_data: _Raw) -> Stack:
    """The plan's software stack with changes from another framework's file and from `--set`. Raises StackError."""
    changes, draft = of_root(study_data.overrides, "stack"), study_data.draft
    if draft is not None and plan.stack == draft.stack:  # else the file could not be read, and this is a default
        from simulator.formats.study.imported import stack_overrides

        changes = [*stack_overrides(draft, study_data.overrides, study_data.given), *changes]
    return patched(Stack.of(plan), changes, StackError)


# what a file with faults settles, if it states it
_OF_A_DRAFT: Final = frozenset({"tp", "cp", "pp", "ep", "etp", "seq_len"})


_DATA_PARALLEL: Final = frozenset({"dp_shard", "dp_replicate"})


def _certain_faults(
    plan: Plan, model: Model | None, cluster: Cluster | None, unknown: frozenset[str], study_data: _Raw
) -> list[Fault]:
    """Faults of a partly known plan, from another framework's file or its own."""
    if study_data.draft is None:
        stated = study_data.raw["plan"].keys() & _DATA_PARALLEL
        return certain_faults(plan, model, cluster, unknown if stated else unknown | _DATA_PARALLEL)
    settled = {f"plan: {name}" for name in _OF_A_DRAFT & set(study_data.raw["plan"])}
    return [fault for fault in certain_faults(plan, model, cluster, unknown | BY_DEVICES) if fault.place in settled]


def _with_degrees(plan: Plan, cluster: Cluster | None) -> Plan:
    """Where no data-parallel degree was given: all devices that the other degrees leave."""
    if cluster is None or plan.flat_fields_set & _DATA_PARALLEL:
        return plan
    size, rest = divmod(cluster.num_devices, plan.cp * plan.tp * plan.pp)
    return plan if rest else plan.copy_with(**{"dp_replicate" if plan.zero == 0 else "dp_shard": size})


def _with_precision(plan: Plan, cluster: Cluster | None) -> Plan:
    """Where no precision was given: the 16 bits that the GPU has units for."""
    if cluster is None or "precision" in plan.flat_fields_set or cluster.device.half == plan.precision.compute:
        return plan
    return plan.copy_with(precision=cluster.device.half)
