"""Stack: what the software does with a device. A data file like a GPU is: `topologies/stacks/<name>.toml`.

Two runs with the same model, plan and GPUs differ by 10-50 % with the generation of the attention kernel, eager or
compiled blocks, and the precision of the loss (../docs/background). So a plan names its stack.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

from pydantic import BaseModel, Field, model_validator

from simulator.base.errors import Fault, InputError, StackError
from simulator.base.presets import TOPOLOGIES, facts
from simulator.base.records import Nested
from simulator.base.schema import Strict, model_at, nearest, read_toml, unknown_name
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.model.experts import StoredExperts
from simulator.spec.plan import Plan
from simulator.spec.software.described import COLUMNS, FABRIC, Described, Nature, named_in, torch_in
from simulator.spec.software.engine import Engine
from simulator.spec.software.nccl import Nccl
from simulator.spec.software.nccl.environment import TUNER_FILE
from simulator.spec.software.records import (
    NOT_FITTED,
    USUAL_HOST,
    USUAL_NCCL,
    USUAL_OVERLAP,
    AttentionBackend,
    Fitted,
    HostTimes,
    Kernels,
    NcclSetup,
    Overlap,
)
from simulator.spec.software.traits import TRAITS, StackTraits

__all__ = ["IN_STEP", "NARROW_MODULE", "AttentionBackend", "Stack"]

_CALLS = "layer_s checkpoint_s dtensor_s redistribute_s view_s node_s dispatch_s wrap_s layout_s hook_s parameter_s message_s"
_INTERPRETER = tuple(f"host_{call}" for call in _CALLS.split())
_HOST_TIMES = ("host_launch_s", "host_module_s", *_INTERPRETER, "host_kernel_s", "host_collective_s", "host_unit_s")
_FITTED = (
    "collective_wait_s",
    "rank_wait_s",
    "gemm_factor",
    "elementwise_factor",
    "grouped_factor",
    "step_overhead_s",
    "experts_sigma",
)
_COEFFICIENTS = (*_HOST_TIMES, *_FITTED)  # measured or fitted: a file that sets one must say where it comes from
_OF_ENGINES = ("request_s", "token_s", "stream_s", "accept_s", "nccl_factor", "sequence_s", "all_reduce")  # likewise
_MAX_CALIBRATION_RUNS = 6
# Products inside whole eager steps of one H200 ran within 1 % of what the power cap leaves them there, colder caches and
# all (experiments/fit_stacks.py, torch-2.11-eager). The prior for every stack that nobody calibrated.
IN_STEP = 0.99

# Host time of Transformer Engine's linear layers in fp8 over the same in bf16: scales, maxima, copies and their tensors are Python.
# "More than 2x" on an H100's host (github.com/NVIDIA/TransformerEngine issue 761).
NARROW_MODULE = 2.0


class _Planned(Protocol):
    """A plan of training or of inference."""

    stack: str

    @property
    def model_fields_set(self) -> set[str]: ...


class Stack(Nested):
    """A software stack: framework, kernels and habits. Every coefficient names its source in `sources`."""

    flat_names: ClassVar = facts(__file__, "flat_names")

    name: str = Field(description="what the stack is called")
    framework: str = Field(description="whose software it is")
    date: str = Field(description="of the software; informative")
    describes: tuple[Described, ...] = Field(
        strict=False, default=(), description="the software, by public names and versions, that tables of runs may mean"
    )
    attention: AttentionBackend = Field(description="which attention kernel runs")
    kernels: Kernels = Field(description="which kernels a step launches")
    host: HostTimes = Field(default=USUAL_HOST, description="what the host spends, and what it waits for")
    nccl: NcclSetup = Field(default=USUAL_NCCL, description="NCCL's version and variables; a text alone is the version")
    overlap: Overlap = Field(default=USUAL_OVERLAP, description="what runs beside what; false alone: nothing does")
    fitted: Fitted = Field(default=NOT_FITTED, description="numbers that measured runs decided")
    engine: Engine | None = Field(default=None, description="of an inference engine: what it does by default")
    known: Literal["described", "assumed", "unknown"] = Field(
        default="described",
        description="how well it stands for the software that runs: it is that software; nobody named any; somebody named "
        "software that no stack describes. The interval of a step widens accordingly",
    )
    sources: dict[str, str] = Field(default={}, description="where each choice comes from")

    @model_validator(mode="after")
    def _coefficients_are_sourced(self) -> Self:
        given = self.flat_fields_set
        problems = [
            f"{name} is set, and `sources` does not say where it comes from"
            for name in _COEFFICIENTS
            if name in given and not self._source(name)
        ]
        efficiencies = self.attention.forward_efficiency or self.attention.backward_efficiency
        efficiencies = efficiencies or self.attention.speed_factor
        if efficiencies and not self.sources.get("attention_efficiency"):
            problems.append("attention efficiencies are set, and `sources` has no attention_efficiency")
        if self.engine is not None:
            problems += [
                f"engine.{name} is set, and `sources` does not say where it comes from"
                for name in _OF_ENGINES
                if getattr(self.engine, name) != Engine.model_fields[name].default
                and not self.sources.get(f"engine_{name}")
            ]
        runs = self.fitted.calibration_runs
        if len(runs) > _MAX_CALIBRATION_RUNS or len(set(runs)) < len(runs):
            problems.append(f"calibration_runs are at most {_MAX_CALIBRATION_RUNS} different ids, not {len(runs)}")
        problems += [*_nccl_problems(self), *_default_problems(self)]
        blocks = {"userbuffers": "fused", "symmetric_memory": "compiled"}.get(self.overlap.tp, self.kernels.blocks)
        if blocks != self.kernels.blocks:
            problems.append(
                f'tp_overlap = "{self.overlap.tp}" cuts {blocks} blocks in pieces, and blocks = "{self.kernels.blocks}"'
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def traits(self) -> StackTraits:
        """What its software does with a layer."""
        return TRAITS[self.kernels.blocks]

    def _source(self, name: str) -> str | None:
        """Where a coefficient comes from; `sources` names it flat or with its record."""
        return self.sources.get(name) or self.sources.get(self.flat_names[name])

    def stored(self, model: Model) -> Model:
        """The model as this software stores its experts."""
        experts, cut_by = model.experts, self.kernels.expert_shards
        if experts is None or experts.cut_by == cut_by:
            return model
        kind = type(experts) if isinstance(experts, StoredExperts) else StoredExperts
        return model.model_copy(update={"experts": kind.model_construct(**(dict(experts) | {"software": cut_by}))})

    def software(self) -> Nccl:
        """NCCL as this stack sets it up."""
        return Nccl.of(self.nccl.version, self.nccl.env)

    def on_host_of(self, device: Device) -> Self:
        """The same on a device whose host is slower or faster than DGX H100's Xeon."""
        if device.host_factor == 1:
            return self
        stated = {name: value for name in _HOST_TIMES if (value := self.value(name)) is not None}
        return self.copy_with(**({name: value * device.host_factor for name, value in stated.items()}))

    def engine_on(self, device: Device) -> Self:
        """The same with the attention kernel that its engine has for the device."""
        kernel = self.engine.attention_on.get(device.architecture) if self.engine else None
        if kernel is None:
            return self
        return self.model_copy(update={"attention": self.attention.model_copy(update={"kernel": kernel})})

    def elementwise_factor_on(self, architecture: str) -> float:
        """Time of kernels that stream over memory over the calibration's, on one architecture."""
        factor = self.fitted.elementwise_factor
        return factor.get(architecture, 1.0) if isinstance(factor, dict) else factor

    def without_host(self) -> Self:
        """The same where one launch starts the whole of forward and backward."""
        return self.copy_with(**dict.fromkeys(_HOST_TIMES, 0.0))

    def without_interpreter(self) -> Self:
        """The same where nothing but launches, modules and collectives takes the host: what is ideal has no other losses."""
        return self.copy_with(**dict.fromkeys(_INTERPRETER, 0.0)) if any(map(self.value, _INTERPRETER)) else self

    def further_kernel_s(self) -> float:
        """Host time of each kernel of a call after the first."""
        return self.host.launch_s if self.host.kernel_s is None else self.host.kernel_s

    def gemm_factor_on(self, architecture: str, dtype: str) -> float:
        """Speed of products inside steps over their speed alone, of one dtype on one architecture."""
        return self.fitted.gemm_factor.get(
            f"{architecture}_{dtype}", self.fitted.gemm_factor.get(architecture, IN_STEP)
        )

    @staticmethod
    def load(name: str | Path) -> Stack:
        """The stack that ships under `name`, or the one in the TOML file at that path.

        Raises StackError with every fault; an unknown name is told the nearest ones.
        """
        return _read(Path(name)) if str(name).endswith(".toml") else _shipped(str(name))

    @classmethod
    def described_as(
        cls, text: str, compiled: str | None = None, nature: Nature = "eager", *, tiled: bool = True
    ) -> tuple[str, Described]:
        """The name of the built-in stack for software named in free text, and its file's description of it.

        compiled: "y", "n", or None where a run is silent. nature: what the run shows of software that no file names, or
        names otherwise compiled; it runs on the generic stack of that nature. tiled: not without flash attention, which tells
        older software, where the text shows no version.
        """
        entries = _entries()
        older = [] if tiled else [entry for name, entry in entries if cls.load(name).attention.kernel == "math"]
        found = named_in(text, [entry for _, entry in entries], older)
        generic = [e for _, e in entries if not e.software and e.tiled in (None, tiled) and e.holds(torch_in(text))]
        word = compiled or (str(found[0].defaults.get("compile", "n")) if found else "ny"[nature == "compiled"])
        meant = [entry for entry in generic if entry.fused == (nature == "fused" and word != "y")]
        fitting = next((entry for entry in (*found, *meant) if entry.compiles(word)), meant[0])
        return next(name for name, entry in entries if entry is fitting), (found or [fitting])[0]

    @staticmethod
    def of(plan: _Planned) -> Stack:
        """The plan's stack; `assumed` where the plan does not name it. Raises StackError."""
        if "stack" in plan.model_fields_set:
            return Stack.load(plan.stack)
        return _assumed(getattr(plan, "software", plan.stack))  # a serving plan has one kind of software

    @staticmethod
    def names() -> tuple[str, ...]:
        """The stacks that ship, sorted."""
        return _names()


@functools.cache
def _names() -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in _folder().glob("*.toml")))


@functools.cache  # what ships does not change while a process runs, and a search asks for it thousands of times
def _shipped(name: str) -> Stack:
    if name not in _names():
        fault = unknown_name("stack", name, _names(), "a stack's .toml")
        stack, entry = Stack.described_as(name[:100])
        own = f"{stack}, which describes that software; " if entry.software else ""
        raise StackError(Fault(fault.place, fault.problem, own + fault.remedy))
    return _read(_folder() / f"{name}.toml")


@functools.cache
def _assumed(name: str) -> Stack:
    return _shipped(name).copy_with(known="assumed")


def _read(file: Path) -> Stack:
    return Stack.parse(_located(read_toml(file, StackError), file.parent), str(file), StackError, from_file=True)


def _nccl_problems(stack: Stack) -> list[str]:
    """The faults of NCCL's version and variables."""
    found = []
    for version, variables in ((stack.nccl.version, {}), ("", stack.nccl.env)):
        try:
            Nccl.of(version, variables, place="nccl_env" if variables else "nccl")
        except InputError as exc:
            found += [str(fault) for fault in exc.faults]
    return found


def _located(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A tuner's table is looked for beside the stack's file."""
    table = data.get("nccl")
    variables = table.get("env") if isinstance(table, dict) else data.get("nccl_env")
    if isinstance(variables, dict) and isinstance(variables.get(TUNER_FILE), str):
        variables[TUNER_FILE] = str(folder / variables[TUNER_FILE])
    return data


@functools.cache
def _entries() -> list[tuple[str, Described]]:
    """(stack, what it describes) of all that ship."""
    return [(name, entry) for name in Stack.names() for entry in Stack.load(name).describes]


def _folder() -> Path:
    return TOPOLOGIES / "stacks"


def _default_problems(stack: Stack) -> list[str]:
    """The faults of what blank columns and keys of a plan, a model or a stack mean."""
    nouns: dict[str, type[BaseModel]] = {"plan": Plan, "model": Model, "stack": Stack}
    found = []
    for name in (name for entry in stack.describes for name in entry.defaults):
        noun, *path = name.split(".") if "." in name else ("plan", name)
        owner = model_at(nouns.get(noun), path[:-1])
        keys = owner.written_fields() if owner is not None and issubclass(owner, Strict) else ()
        if name not in (*COLUMNS, *FABRIC) and path[-1] not in keys:
            near = nearest(name, (*COLUMNS, *Plan.written_fields()))
            found.append(
                f"describes: defaults: {name[:60]} is no column and no key of a plan" + f" ({near})" * bool(near)
            )
    return found
