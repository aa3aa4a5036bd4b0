"""The records of a stack: its kernels, its host, what runs beside what, NCCL, and what was fitted."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from simulator.base.schema import Strict
from simulator.base.units import Bytes, Seconds, Share
from simulator.spec.model.experts import ExpertShards
from simulator.spec.software.traits import Blocks

# Speed of the products of several experts over the same as one batch: median of 48 that Transformer Engine ran on A100
# (1.02) and B200 (0.86), 512 rows an expert or more (experiments/grouped_products.py).
GROUPED: Final = 0.89


def _seconds(description: str) -> Any:  # noqa: ANN401  as pydantic's Field
    """A time that most software does not take."""
    return Field(ge=0, default=0.0, description=description)


class AttentionBackend(Strict):
    """`[attention]`: which attention kernel runs."""

    kernel: Literal["flash1", "flash1_triton", "flash2", "flash3", "cudnn", "math"] = Field(
        description="the generation of the attention kernel: the CUDA and Triton kernels of 2022; tiled kernels of 2023 on; "
        "`math` is unfused (two products, softmax and dropout over seq × seq)"
    )
    expand_kv_heads: bool = Field(
        default=False, description="K and V are repeated to all heads first (no native grouped-query attention)"
    )
    random_state: bool = Field(
        default=True, description="the kernel returns the state of dropout's generator as tensors, whatever the dropout"
    )
    forward_efficiency: dict[str, Share] = Field(
        default={},
        description="by architecture: fraction of the device's peak on causal FLOP, for a kernel that no kernel table has; "
        "empty: the calibration's curves",
    )
    backward_efficiency: dict[str, Share] = Field(default={}, description="the same of the backward")
    speed_factor: dict[str, PositiveFloat] = Field(
        default={},
        description="by architecture: speed of this stack's attention kernel over the calibration's curve; empty: 1",
    )

    def states_speed(self, direction: str) -> bool:
        """The stack states its own speed for this direction, instead of the calibration's curves."""
        return bool(self.forward_efficiency if direction == "forward" else self.backward_efficiency)


class Kernels(Strict):
    """`[kernels]`: which kernels a step launches."""

    blocks: Blocks = Field(
        description="how a block is executed: one kernel an operator; fused by a compiler; fused by hand (Transformer Engine, "
        "apex); one kernel an operator in layers of the framework's own, whose linear layers gather and scatter tokens "
        "themselves (nanotron)"
    )
    norm: Literal["eager", "eager_cast", "fused"] = Field(
        default="fused",
        description="several kernels and fp32 temporaries, also with the result cast before its weight (transformers), or one",
    )
    rope: Literal["half", "complex_fp32", "pairs_fp32", "fused", "unfused"] = Field(
        default="half",
        description="rotate-half, fp32 complex views, fp32 operators on pairs (torchtune), one kernel; or Megatron's own operators (`--no-rope-fusion`)",
    )
    latent_rope: Literal["joined", "in_place"] = Field(
        default="joined",
        description="latent attention's rotating channels: turned apart and joined to the others, or turned in place by "
        "Megatron's fused kernels (`--apply-rope-fusion` with `--enable-experimental`), which also split keys from values",
    )
    activation_backward: Literal["kernel", "operators"] = Field(
        default="kernel",
        description="SiLU's backward in one, or written out with five temporaries, as PyTorch does on a device without kernels "
        "of its own",
    )
    norm_dtype: Literal["fp32", "compute"] = Field(default="compute", description="what the norm computes in")
    loss: Literal[
        "eager",
        "fp32_eager",
        "fp32_cast",
        "fp32_cast_fused",
        "fp32_shifted",
        "fp32_shifted_fused",
        "shifted",
        "shifted_nll",
        "fp32_compiled",
        "fp32_in_place",
        "fp32_beside",
        "fused",
        "fused_linear",
        "cut",
        "chunked",
        "output_chunks",
        "linear_chunks",
        "in_place",
    ] = Field(
        default="fp32_eager",
        description="separate kernels in the logits' own dtype, or behind a cast to fp32; the same of a copy without each sequence's last row (transformers; `fp32_cast` "
        "before 4.46, whose 16-bit logits go), also with one kernel each way instead of the separate ones; such a copy in the logits' own dtype (`shifted`), whose "
        "log-probabilities autocast widens for the loss (`shifted_nll`); with the head, in chunks of rows that leave the gradient of its "
        "input (`fused_linear`: Liger), or in one kernel that keeps no logits and makes them again backward (`cut`: Cut Cross Entropy), or in checkpointed chunks of 256 rows whose weight is widened to fp32 each time (`chunked`: TRL's `chunked_nll`), or in eight chunks whose logits stay until the loss is known (`output_chunks`: torchtune's `CEWithChunkedOutputLoss`) or go one by one (`linear_chunks`: its `LinearCrossEntropyLoss`); the cast fused in; Megatron's without fusion, in one fp32 storage, or in a "
        "second one beside the logits (nanotron); one "
        "kernel (Megatron's own where blocks are fused by hand); one that leaves the gradient where the logits were",
    )
    gathers_logits: bool = Field(
        default=False,
        description="where `tp` splits the vocabulary, each rank gathers whole logits before the loss (`ColwiseParallel` with "
        "replicated outputs), as against losses on parts of them (`loss_parallel`, Megatron's)",
    )
    holds_logits: bool = Field(
        default=False, description="the script's own variable holds the logits while the loss goes backward"
    )
    gathers_each: bool = Field(
        default=False,
        description="with sequence parallelism each linear layer gathers its tokens and scatters its input's gradient by itself "
        "(`ColwiseParallel(input_layouts=Shard(1))` on Q, K, V, gate and up), instead of once for all that read them "
        "(`PrepareModuleInput`)",
    )
    fills_outputs: bool = Field(
        default=False,
        description="every tensor that an extension's own products, norms and attention return is filled first, a kernel each "
        "(`torch.use_deterministic_algorithms`)",
    )
    weight_gradients: Literal["made", "accumulated", "added"] = Field(
        default="made",
        description="a tensor each; or added into Megatron's gradient buffer by the product, while autograd gets a dummy of "
        "each weight's shape, which stays; or made and added there by a kernel each (no `--gradient-accumulation-fusion`)",
    )
    gated_activation: Literal["fused", "operators"] = Field(
        default="fused",
        description="of hand-fused blocks: one kernel each way that weights experts' rows too; or halves, activation, an offset "
        "of 0, products and casts by themselves (Megatron-Core without `bias_activation_fusion`: `--no-bias-swiglu-fusion`)",
    )
    squared_relu: Literal["fused", "operators"] = Field(
        default="fused",
        description="of hand-fused blocks: one kernel each way, or ReLU and power by themselves, though other activations are "
        "one kernel (NeMo)",
    )
    dequantised: Literal["kernel", "operators"] = Field(
        default="kernel",
        description="GPTQ's weights in 16 bits: by one kernel before each product, or by torch's operators, whose result autograd "
        "keeps for the backward (AutoGPTQ without exllama)",
    )
    quantised_keeps_input: bool = Field(
        default=False,
        description="products of frozen quantised weights keep their input, which their backward does not need (bitsandbytes "
        "up to 0.41: MatMul4Bit)",
    )
    adapters: Literal["operators", "fused", "copied"] = Field(
        default="operators",
        description="of fine-tuning: LoRA's pairs as operators beside their layer (peft); inside its own autograd function, "
        "which keeps nothing but the input (unsloth), and what dropout left of it; or operators, and a copy among columns of zeros of what adapts some of a joint "
        "Q, K and V, which keeps what it copied (LitGPT: LoRAQKVLinear)",
    )
    loss_metrics: NonNegativeInt = Field(
        default=0,
        le=100,
        description="training metrics that compute an eager fp32 cross-entropy of the logits again, forward only",
    )
    dropout: bool = Field(
        default=False,
        description="dropout behind unfused attention's softmax, both branches of a layer; masks are kept",
    )
    autocast: bool = Field(default=False, description="wider parameters are cast at each use, as `torch.autocast` does")
    selective_keeps: Literal["products", "every_second_product"] = Field(
        default="products",
        description="what selective recomputation keeps besides attention; torchtitan runs each second product again",
    )
    fp8_transposes: Literal["once", "each_use"] = Field(
        default="once",
        description="of weights that are kept in fp8 (`fp8_all_gather` under Megatron), on Hopper: made once a step, or in each "
        "backward (Transformer Engine before 2: transpose_2d of a parameter fills no cache)",
    )
    grouped_gemm: Literal["one", "one_each", "modules"] = Field(
        default="one",
        description="the products of a rank's experts: one kernel for all, one each from one call (Transformer Engine: cuBLAS "
        "on several streams), or a module each (Megatron's SequentialMLP)",
    )
    expert_rows: Literal["sorted", "each", "padded", "stacked", "masked"] = Field(
        default="sorted",
        description="how rows come to a rank's experts ([background](../background/experts.md#experts-in-plain-pytorch)): sorted "
        "by kernels; gathered, run and added expert by expert in a Python loop; copied slice by slice into one padded tensor "
        "for a product of all, whose weights are one tensor (`padded`) or joined from modules each time (`stacked`); or by products with masks of tokens by rows (`masked`: "
        "GShard's, DeepSpeed's)",
    )
    expert_shards: ExpertShards = Field(
        default="rows",
        description="how FSDP2 cuts the weights of routed experts ([background](../background/experts.md#shards-of-experts)): "
        "`rows`, where each expert is a module; stacked weights by expert, padded to a whole one a shard (`experts`), or by "
        "rows (`Shard(1)`) where there are more shards than experts (`rows_beyond`), or only with `ep` above 1 "
        "(`rows_with_ep`)",
    )
    router_product: Literal["fp32", "mixed"] = Field(
        default="fp32",
        description="the router's product in fp32: of operands cast to it, or of 16-bit operands into an fp32 result and as "
        "tf32 backward (Megatron-LM since June 2025, RouterGatingLinearFunction: Transformer Engine's general_gemm)",
    )
    routing_launches: NonNegativeInt = Field(
        default=30,
        description="small kernels of a layer's router and dispatcher, each way: logits, top-k, maps, counts, losses",
    )
    early_stop: bool = Field(
        default=True, description="recomputation (non-reentrant checkpointing) ends once every saved tensor exists"
    )
    clips: Literal["", "scaled", "read"] = Field(
        default="",
        description="the step clips gradients by their norm ([background](../background/ops.md)); `read`: which the host reads",
    )


class HostTimes(Strict):
    """`[host]`: what the host spends, and what it waits for."""

    launch_s: Seconds = Field(ge=0, default=8e-6, description="host time an operator, forward")
    module_s: Seconds = _seconds(
        "host time around the kernels of a linear layer or attention, each way ([host](../background/host.md)): "
        "Transformer Engine's modules are Python, tens of calls around one or two kernels",
    )
    layer_s: Seconds = _seconds(
        "host time of a layer, each way, for what is no launch, linear layer, attention or collective: views, modules, "
        "autograd's nodes, Triton's launchers ([host](../background/host.md#eager-pytorch))",
    )
    checkpoint_s: Seconds = _seconds(
        "host time of a layer that is computed again, beside its operators: states of dropout and autocast kept and set, "
        "its inputs cut off, a backward started in a backward",
    )
    dtensor_s: Seconds = _seconds(
        "host time that DTensor adds to a linear layer which tensor parallelism splits, each way: its operators, hooks "
        "that wrap and unwrap tensors ([host](../background/host.md#tensor-parallelism-by-dtensor))",
    )
    redistribute_s: Seconds = _seconds(
        "host time that DTensor adds to a tensor-parallel collective: the change of layout around it",
    )
    view_s: Seconds = _seconds("captured: host time of an operator that launches nothing")
    node_s: Seconds = _seconds("captured: host time of a node of autograd's graph")
    dispatch_s: Seconds = _seconds("captured: host time that DTensor adds to an operator")
    wrap_s: Seconds = _seconds("captured: of a tensor that becomes a DTensor, or back")
    layout_s: Seconds = _seconds("captured: of a change of a DTensor's layout, each way")
    adapter_s: Seconds = Field(
        ge=0,
        default=5e-4,
        description="host time of FSDP1's hooks around an adapter that is a unit of its own, behind which the host waits for the "
        "device (`limit_all_gathers`); a prior, as `unit_s` of torch-2.11-eager",
    )
    hook_s: Seconds = _seconds(
        "host time of DeepSpeed's hooks around a linear layer in stage 3, each way: its parameters are found, awaited "
        "and freed in Python, norms and containers beside it counted in",
    )
    parameter_s: Seconds = _seconds(
        "host time of a parameter in the loops of a step's end that run over parameters one by one: norm and "
        "scale of its gradient, its optimizer's group, its copy",
    )
    parameter_calls: NonNegativeInt = Field(
        default=0,
        description="operators that the step's end calls for each parameter whose state the rank holds, to log what it finds "
        "(Megatron-LM: `--log-params-norm` 1, `--log-num-zeros-in-grad` 4)",
    )
    step_calls: NonNegativeInt = Field(
        default=0,
        description="further calls at the step's end, each as long as an operator: scalars that are reduced, read and logged",
    )
    message_s: Seconds = _seconds(
        "what a tensor that one pipeline stage sends another costs both before it travels, while neither computes: "
        "its shape goes ahead in messages that the receiver's host reads",
    )
    activation_tensors: int = Field(
        ge=1,
        default=1,
        description="tensors that travel with a micro-batch's activations (nanotron sends the mask too)",
    )
    kernel_s: Seconds | None = Field(
        ge=0,
        default=None,
        description="host time of each further kernel that one call launches from C++: an expert's product, a piece of one; not "
        "set: as `launch_s`",
    )
    collective_s: Seconds = Field(
        ge=0, default=5e-5, description="host time to issue one collective, its hooks and copies"
    )
    unit_s: Seconds = _seconds("host time of FSDP's hooks around one collective of a unit, beside that")
    blocking: bool = Field(default=False, description="the host waits for the device")
    reads_loss: bool = Field(
        default=False,
        description="the host reads each micro-batch's loss before its backward (Megatron-LM's check for NaN), and so starts "
        "anew ([host](../background/host.md))",
    )
    waits_for_blocks: bool = Field(
        default=False,
        description="the host waits for the device behind each block, each way, as where layers are timed one by one "
        "([host](../background/host.md#layers-timed-one-by-one))",
    )


class NcclSetup(Strict):
    """`[nccl]`: NCCL's version and variables. `nccl = "2.27.3"` alone sets `version`."""

    version: str = Field(default="", description="of NCCL, as `2.27.3`; a current one where none is given")
    env: dict[str, str] = Field(
        default={}, description="NCCL's variables as a shell sets them; see [below](#nccls-variables)"
    )


class Overlap(Strict):
    """`[overlap]`: what runs beside what. `overlap = false` alone sets `communication`."""

    communication: bool = Field(default=True, description="false: nothing runs beside communication")
    late_gradients: bool = Field(
        default=False,
        description="whole gradients are reduced behind the last backward, not as they appear (Megatron-LM before "
        "`--overlap-grad-reduce` of 2023, DeepSpeed's pipelines)",
    )
    late_parameters: bool = Field(
        default=False,
        description="all updated parameters are gathered before the next forward, not each beside the layers before it "
        "(Megatron without `--overlap-param-gather`)",
    )
    tp: Literal["none", "backward", "userbuffers", "symmetric_memory"] = Field(
        default="none",
        description="what tensor-parallel collectives run beside: nothing; in the backward the product that does not need them; "
        "[products cut in pieces](../background/tensor-parallel.md#products-in-pieces), with sequence parallelism: of "
        'Transformer Engine (`blocks = "fused"`), or of torch (`"compiled"`)',
    )
    tp_whole: tuple[Literal["all_gather", "reduce_scatter"], ...] = Field(
        default=(),
        strict=False,
        description="what `userbuffers` leaves whole and exposed, before or behind its product "
        "(`--disable-tp-comm-overlap-ag`, `-rs`)",
    )
    records_streams: bool = Field(
        default=False,
        description="what a tensor-parallel reduce-scatter reads is recorded on NCCL's stream: once freed, the allocator reuses it "
        "when the device has passed the call, and a host that runs ahead of the device takes new memory meanwhile "
        "([memory](../background/memory.md#what-another-stream-has-read))",
    )
    all_reduce_combine: Bytes = Field(
        ge=0,
        default=0,
        description="all-reduces between replicas are joined until they hold this much (XLA's combiner); 0: one a unit",
    )


class Fitted(Strict):
    """`[fitted]`: numbers that measured runs decided, and what they leave unexplained."""

    gemm_factor: dict[str, PositiveFloat] = Field(
        default={},
        description="by architecture (`hopper`), or for one dtype on it (`hopper_fp8`): speed of products inside real steps "
        "over their sustained speed alone; 0.99 where none is given",
    )
    elementwise_factor: PositiveFloat | dict[str, PositiveFloat] = Field(
        default=1.0,
        description="time of kernels that stream over memory over the calibration's; by architecture where the stack was fitted "
        "on several, for streams are measured on one and borrowed for another",
    )
    grouped_factor: float = Field(
        gt=0, default=GROUPED, description="speed of experts' products over a batch of plain products of the same shape"
    )
    collective_wait_s: Seconds = _seconds(
        "what a collective inside a block waits on the device for the last of its ranks, each of which has a host "
        "of its own",
    )
    rank_wait_s: Seconds = _seconds(
        "what a host may wait for each rank of another node before a collective where neither `[fabric.measured]` nor `call_rank_s` says "
        "whether it does: some of the measured runs did. Over nodes an interval's upper end allows for it",
    )
    step_overhead_s: Seconds = _seconds("a constant a step")
    # 0.05: the factors found for six fitted stacks lie 4 % (products, some 60 % of a step) and 35 % (elementwise kernels, some
    # 12 %) around their priors, which makes 0.05 of a step
    sigma: PositiveFloat = Field(
        le=5,
        default=0.05,
        description="one-sigma relative uncertainty of steps that kernels and links do not explain. Of a fitted stack: what "
        "`experiments/fit_stacks.py` measures on plans that it did not see",
    )
    # 0.11: what releases of the one framework differ by whose tables repeat the same plans (experiments/release_spread.py)
    experts_sigma: NonNegativeFloat = Field(
        le=5,
        default=0.11,
        description="the same of mixtures of experts, besides: what releases of the software differ by. Plans under one stack "
        "share it",
    )
    calibration_runs: tuple[str, ...] = Field(
        strict=False,
        default=(),
        description="at most 6 measured runs that coefficients were fitted on; a backtest never scores them",
    )


USUAL_HOST: Final = HostTimes()
USUAL_NCCL: Final = NcclSetup()
USUAL_OVERLAP: Final = Overlap()
NOT_FITTED: Final = Fitted()
