"""Stack: what the software does with a device. A data file like a GPU is: `topologies/stacks/<name>.toml`.

Two runs with the same model, plan and GPUs differ by 10-50 % with the generation of the attention kernel, eager or
compiled blocks, and the precision of the loss (../docs/background). So a plan names its stack.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from simulator.base.errors import Fault, InputError, StackError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import Strict, nearest, read_toml
from simulator.base.units import Bytes, Seconds
from simulator.spec.cluster.device import Device
from simulator.spec.software.described import Described, named_in
from simulator.spec.software.nccl import Nccl
from simulator.spec.software.nccl.environment import TUNER_FILE
from simulator.spec.software.traits import TRAITS, Blocks, StackTraits

# Numbers that were measured or fitted: a file that sets one must say where it comes from.
_COEFFICIENTS = (
    "host_launch_s",
    "host_module_s",
    "host_kernel_s",
    "host_collective_s",
    "collective_wait_s",
    "host_unit_s",
    "gemm_factor",
    "elementwise_factor",
    "grouped_factor",
    "step_overhead_s",
    "experts_sigma",
)
_Factor = Annotated[float, Field(gt=0)]
_HOST_TIMES = ("host_launch_s", "host_module_s", "host_kernel_s", "host_collective_s", "host_unit_s")
_MAX_CALIBRATION_RUNS = 6
# Products inside whole eager steps of one H200 ran within 1 % of what the power cap leaves them there, colder caches and
# all (experiments/fit_stacks.py, torch-2.11-eager). The prior for every stack that nobody calibrated.
IN_STEP = 0.99

# Host time of Transformer Engine's linear layers in fp8 over the same in bf16: scales, maxima, copies and their tensors are Python.
# "More than 2x" on an H100's host (github.com/NVIDIA/TransformerEngine issue 761).
NARROW_MODULE = 2.0

# Speed of the products of several experts over the same as one batch: median of 48 that Transformer Engine ran on A100
# (1.02) and B200 (0.86), 512 rows an expert or more (experiments/grouped_products.py).
GROUPED = 0.89


class AttentionBackend(Strict):
    """Which attention kernel runs.

    kernel: flash2 / flash3 / cudnn: tiled kernels of 2023 on; flash1, flash1_triton: the CUDA and Triton kernels of 2022;
            math: unfused (two products, softmax and dropout over seq × seq).
    expand_kv_heads: K and V are repeated to all heads before the kernel (no native grouped-query attention).
    random_state: the kernel returns the seed and offset of dropout's generator as tensors, whatever the dropout.
    forward_efficiency, backward_efficiency: fraction of the device's peak on causal FLOP, by architecture, where the
            kernel is the stack's own and no kernel table has it; empty = the calibration's curves.
    """

    kernel: Literal["flash1", "flash1_triton", "flash2", "flash3", "cudnn", "math"]
    expand_kv_heads: bool = False
    random_state: bool = True
    forward_efficiency: dict[str, float] = {}
    backward_efficiency: dict[str, float] = {}
    # Achieved speed over the calibrated curve, by architecture: the kernel's version and tuning in this stack
    speed_factor: dict[str, float] = {}

    def states_speed(self, direction: str) -> bool:
        """The stack states its own speed for this direction, instead of the calibration's curves."""
        return bool(self.forward_efficiency if direction == "forward" else self.backward_efficiency)


class Stack(Strict):
    """A software stack: framework, kernels and habits. Every coefficient names its source in `sources`."""

    name: str
    framework: str
    date: str
    describes: tuple[Described, ...] = Field(strict=False, default=())  # by public name and version
    attention: AttentionBackend
    # How a block is executed: one kernel an operator, fused by a compiler, or hand-fused (Transformer Engine, apex).
    # `traits` says what that means: nobody else compares the word.
    blocks: Blocks
    norm: Literal["eager", "fused"] = "fused"  # eager: several kernels and fp32 temporaries; fused: one
    rope: Literal["half", "complex_fp32", "fused"] = "half"
    # Latent attention's rotating channels: turned apart and joined to the others, or turned in place by Megatron's fused
    # kernels (--apply-rope-fusion with --enable-experimental), which also split keys from values
    latent_rope: Literal["joined", "in_place"] = "joined"
    # kernel: SiLU's backward is one; operators: written out, as PyTorch does on a device without kernels of its own
    activation_backward: Literal["kernel", "operators"] = "kernel"
    norm_dtype: Literal["fp32", "compute"] = "compute"
    # fused: Megatron's own where blocks are fused by hand; fp32_in_place: the same operator by operator, in one fp32
    # storage; in_place: one kernel leaves the gradient where the logits were
    loss: Literal["fp32_eager", "fp32_compiled", "fp32_in_place", "fused", "in_place"] = "fp32_eager"
    # accumulated: products add into Megatron's gradient buffer, and autograd gets a dummy of each weight's shape, made once;
    # added: products write gradients of their own, which a kernel each adds to that buffer
    weight_gradients: Literal["made", "accumulated", "added"] = "made"
    # fused: one kernel each way; operators: ReLU and power by themselves, though other activations are one kernel (NeMo)
    squared_relu: Literal["fused", "operators"] = "fused"
    # Training metrics that compute an eager fp32 cross-entropy of every micro-batch's logits once more, forward only
    loss_metrics: int = Field(ge=0, default=0)
    # Dropout behind attention's softmax (where it is unfused) and both branches of a layer: its masks are kept
    dropout: bool = False
    # autocast: fp32 parameters cast at each use (and the casts cost time and memory), as torch.autocast does
    autocast: bool = False
    # What the selective policy keeps besides attention; torchtitan runs each second product of a block again
    selective_keeps: Literal["products", "every_second_product"] = "products"
    # Transposes of weights that are kept in fp8: made at each use (Transformer Engine before 2: transpose_2d of a parameter fills
    # no cache), or once a step
    fp8_transposes: Literal["once", "each_use"] = "once"
    # The products of a rank's experts: one kernel for all, one each from one call (Transformer Engine: cuBLAS on several
    # streams), or a module each (Megatron's SequentialMLP)
    grouped_gemm: Literal["one", "one_each", "modules"] = "one"
    grouped_factor: float = Field(gt=0, default=GROUPED)  # their speed over that of a batch of plain products
    # The router's product in fp32: of operands cast to it; or of 16-bit operands into an fp32 result, and backward as tf32
    # (Megatron-LM since June 2025, RouterGatingLinearFunction: Transformer Engine's general_gemm)
    router_product: Literal["fp32", "mixed"] = "fp32"
    # Small kernels of a layer's router and dispatcher, each way: logits, top-k, maps, counts, losses
    routing_launches: int = Field(ge=0, default=30)
    early_stop: bool = True  # non-reentrant checkpointing stops the recompute once all saved tensors exist
    host_launch_s: Seconds = Field(ge=0, default=8e-6)  # host time an operator, forward
    # Host time around the launches of a linear layer or attention, each way: Transformer Engine's modules are Python, tens
    # of calls around one or two kernels
    host_module_s: Seconds = Field(ge=0, default=0.0)
    # Host time of each further kernel that one call launches from C++: an expert's product, a piece of one. None: as any
    host_kernel_s: Seconds | None = Field(ge=0, default=None)
    host_blocking: bool = False
    # The host reads the loss of each micro-batch before its backward (Megatron-LM's check for NaN), and so starts anew
    reads_loss: bool = False
    # The host waits for the device behind each block, each way, as where layers are timed one by one: no lead of the one over the
    # other passes from block to block
    host_waits_for_blocks: bool = False
    host_collective_s: Seconds = Field(ge=0, default=5e-5)  # host time to issue one collective, its hooks and copies
    # What a collective inside a block waits on the device for the last of its ranks, each of which has a host of its own
    collective_wait_s: Seconds = Field(ge=0, default=0.0)
    host_unit_s: Seconds = Field(
        ge=0, default=0.0
    )  # host time of FSDP's hooks around one collective of a unit, beside it
    nccl: str = ""  # version of NCCL
    # NCCL's environment variables, as a shell sets them; a path in NCCL_TUNER_CONFIG_FILE is relative to the stack's file
    nccl_env: dict[str, str] = {}
    # Share of collectives that the framework leaves exposed whatever the schedule would allow (1 = no overlap at all)
    overlap: bool = True
    # Whole gradients are reduced behind the last backward, not as they appear (Megatron-LM before --overlap-grad-reduce of
    # 2023, DeepSpeed's pipelines)
    late_gradients: bool = False
    # Megatron's distributed optimizer gathers all updated parameters before the next forward, not each beside the layers before
    # it (no --overlap-param-gather)
    late_parameters: bool = False
    # What tensor-parallel collectives run beside: nothing; in the backward the product that does not need them
    # ("backward"); products cut in pieces that their own collective feeds or drains ("userbuffers", Transformer Engine;
    # "symmetric_memory", torch's asynchronous tensor parallelism on compiled blocks)
    tp_overlap: Literal["none", "backward", "userbuffers", "symmetric_memory"] = "none"
    # Kinds that Transformer Engine's userbuffers leave whole, before or behind their product (--disable-tp-comm-overlap-ag, -rs)
    tp_whole: tuple[Literal["all_gather", "reduce_scatter"], ...] = Field(default=(), strict=False)
    # Gradients' all-reduces between replicas are joined until they hold this much (XLA's combiner); 0: one a unit
    all_reduce_combine: Bytes = Field(ge=0, default=0)
    # Speed of products inside real steps over their sustained speed alone: by architecture ("hopper"), or for one dtype on
    # it ("hopper_fp8"); IN_STEP where none is given
    gemm_factor: dict[str, _Factor] = {}
    # Time over the calibrated stream's time; by architecture where the stack was fitted on several, for streams are measured on
    # one and borrowed for another
    elementwise_factor: _Factor | dict[str, _Factor] = 1.0
    step_overhead_s: Seconds = Field(ge=0, default=0.0)
    # One-sigma relative uncertainty of whole steps that the kernels' own does not explain. Of a fitted stack: what
    # experiments/fit_stacks.py measures on plans that it did not see. Else 0.05: the factors found for six fitted stacks
    # lie 4 % (products, some 60 % of a step) and 35 % (elementwise kernels, some 12 %) around their priors, which makes
    # 0.05 of a step.
    sigma: float = Field(gt=0, default=0.05)
    # The same of mixtures of experts, besides: what releases of the software differ by that are one stack here
    experts_sigma: float = Field(ge=0, default=0.0)
    calibration_runs: tuple[str, ...] = Field(
        strict=False, default=()
    )  # at most 6 row ids the coefficients were fitted on; never scored
    sources: dict[str, str] = {}

    @model_validator(mode="after")
    def _coefficients_are_sourced(self) -> Self:
        problems = [
            f"{name} is set, and `sources` does not say where it comes from"
            for name in _COEFFICIENTS
            if name in self.model_fields_set and not self.sources.get(name)
        ]
        efficiencies = self.attention.forward_efficiency or self.attention.backward_efficiency
        efficiencies = efficiencies or self.attention.speed_factor
        if efficiencies and not self.sources.get("attention_efficiency"):
            problems.append("attention efficiencies are set, and `sources` has no attention_efficiency")
        runs = self.calibration_runs
        if len(runs) > _MAX_CALIBRATION_RUNS or len(set(runs)) < len(runs):
            problems.append(f"calibration_runs are at most {_MAX_CALIBRATION_RUNS} different ids, not {len(runs)}")
        problems += _nccl_problems(self)
        blocks = {"userbuffers": "fused", "symmetric_memory": "compiled"}.get(self.tp_overlap, self.blocks)
        if blocks != self.blocks:
            problems.append(
                f'tp_overlap = "{self.tp_overlap}" cuts {blocks} blocks in pieces, and blocks = "{self.blocks}"'
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def traits(self) -> StackTraits:
        """What its software does with a layer."""
        return TRAITS[self.blocks]

    def software(self) -> Nccl:
        """NCCL as this stack sets it up."""
        return Nccl.of(self.nccl, self.nccl_env)

    def on_host_of(self, device: Device) -> Self:
        """The same on a device whose host is slower or faster than DGX H100's Xeon."""
        if device.host_factor == 1:
            return self
        stated = {name: value for name in _HOST_TIMES if (value := getattr(self, name)) is not None}
        return self.model_copy(update={name: value * device.host_factor for name, value in stated.items()})

    def elementwise_factor_on(self, architecture: str) -> float:
        """Time of kernels that stream over memory over the calibration's, on one architecture."""
        factor = self.elementwise_factor
        return factor.get(architecture, 1.0) if isinstance(factor, dict) else factor

    def without_host(self) -> Self:
        """The same where one launch starts the whole of forward and backward."""
        return self.model_copy(update=dict.fromkeys(_HOST_TIMES, 0.0))

    def further_kernel_s(self) -> float:
        """Host time of each kernel of a call after the first."""
        return self.host_launch_s if self.host_kernel_s is None else self.host_kernel_s

    def gemm_factor_on(self, architecture: str, dtype: str) -> float:
        """Speed of products inside steps over their speed alone, of one dtype on one architecture."""
        return self.gemm_factor.get(f"{architecture}_{dtype}", self.gemm_factor.get(architecture, IN_STEP))

    @staticmethod
    def load(name: str | Path) -> Stack:
        """The stack that ships under `name`, or the one in the TOML file at that path.

        Raises StackError with every fault; an unknown name is told the nearest ones.
        """
        file = Path(name)
        return _read(file) if file.suffix == ".toml" else _shipped(str(name))

    @classmethod
    def described_as(cls, text: str, compiled: str | None = None) -> tuple[str, Described]:
        """The name of the stack that ships for software named in free text, and what its file says of that software.

        compiled: "y", "n", or None where a run is silent. Software that no file names, or names otherwise compiled, runs on
        the generic stack, compiled or not.
        """
        entries = _entries()
        found = named_in(text, [entry for _, entry in entries])
        generic = [entry for _, entry in entries if not entry.software]
        word = compiled or (str(found[0].defaults.get("compile", "n")) if found else "n")
        fitting = next((entry for entry in (*found, *generic) if entry.compiles(word)), generic[0])
        return next(name for name, entry in entries if entry is fitting), (found or [fitting])[0]

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
        raise StackError(Fault(place=f"stack {name!r}", problem="is unknown", remedy=nearest(name, _names())))
    return _read(_folder() / f"{name}.toml")


def _read(file: Path) -> Stack:
    return Stack.parse(_located(read_toml(file, StackError), file.parent), str(file), StackError, from_file=True)


def _nccl_problems(stack: Stack) -> list[str]:
    """The faults of NCCL's version and variables."""
    found = []
    for version, variables in ((stack.nccl, {}), ("", stack.nccl_env)):
        try:
            Nccl.of(version, variables, place="nccl_env" if variables else "nccl")
        except InputError as exc:
            found += [str(fault) for fault in exc.faults]
    return found


def _located(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A tuner's table is looked for beside the stack's file."""
    variables = data.get("nccl_env")
    if isinstance(variables, dict) and isinstance(variables.get(TUNER_FILE), str):
        variables[TUNER_FILE] = str(folder / variables[TUNER_FILE])
    return data


@functools.cache
def _entries() -> list[tuple[str, Described]]:
    """(stack, what it describes) of all that ship."""
    return [(name, entry) for name in Stack.names() for entry in Stack.load(name).describes]


def _folder() -> Path:
    return TOPOLOGIES / "stacks"
