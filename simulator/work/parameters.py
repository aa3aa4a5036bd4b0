"""Parameters as they are trained: those of the model that are not frozen, those of adapters; and frozen weights as stored.

Shapes of adapters are peft's (tuners/lora/layer.py, tuners/ia3/layer.py); Megatron's stand beside its joint linear layers.
Sizes of stored weights: bitsandbytes (functional.py: quantize_4bit in blocks of 64, scales in blocks of 256; nn/modules.py:
Linear8bitLt has a scale a row), and GPTQ with groups of 128 (AutoGPTQ, QuantLinear).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Final, NamedTuple

from simulator.base.kernels import DTYPE_BYTES
from simulator.parallel.model_shard import whole_body
from simulator.spec.model import FORWARD_SUFFIX, Model, Parameter, number_of
from simulator.spec.model import ModelPart as Part
from simulator.spec.model.layer_kinds import TOWER_KINDS, plain
from simulator.spec.model.tower import TOWER_WEIGHT
from simulator.spec.plan import PeftPlan, Plan
from simulator.spec.plan.peft import KEYS, BaseWeights

NF4_BLOCK: Final = 64  # elements that share a scale
_SCALE_BLOCK: Final = 256  # scales that share a scale of their own, where they are quantised too
GPTQ_GROUP: Final = 128
_JOINED: Final = (
    ("attention.qkv", ("attention.q", "attention.k", "attention.v")),
    ("mlp.gate_up", ("mlp.gate", "mlp.up")),
)


class Stored(NamedTuple):
    """A frozen tensor's bytes: what FSDP and ZeRO-3 cut and gather, and scales that every rank holds."""

    size: int
    beside: tuple[int, ...] = ()


def stored(numel: int, width: int, base: BaseWeights, compute_bytes: int) -> Stored:
    """A matrix of `numel` elements in rows of `width`."""
    match base:
        case "nf4":
            return Stored(-(-numel // 2), (-(-numel // NF4_BLOCK) * 4,))
        case "nf4_double":
            scales = -(-numel // NF4_BLOCK)
            return Stored(-(-numel // 2), (scales, -(-scales // _SCALE_BLOCK) * 4))
        case "int8":
            return Stored(numel, (numel // width * 4,))
        case "fp8":
            return Stored(numel, (4,))
        case "gptq":
            groups = -(-numel // GPTQ_GROUP)
            return Stored(-(-numel // 2), (2 * groups, -(-groups // 2), 4 * width))
        case "compute" | "fp32":
            return Stored(numel * (compute_bytes if base == "compute" else DTYPE_BYTES[base]))


def is_matrix(part: str, shape: tuple[int, ...]) -> bool:
    """A matrix of a layer (or a stack of them), as against embedding, head, norms and biases."""
    return len(shape) > 1 and part not in ("embedding", "head")


def trained(model: Model, part: Part, plan: Plan) -> tuple[Parameter, ...]:
    """(name, shape) of what is trained of a part, adapters behind the weights that they stand beside."""
    parameters = model.parameter_shapes(part)
    if not plan.peft.any:
        return parameters
    peft = plan.peft.at(number_of(part))
    return (
        *(one for one in parameters if peft.trains(one[0])),
        *(adapter for one in _modules(parameters, plan) for adapter in _adapters(*one, peft)),
        *(_prefix(model.kv_width, peft) if any(name in KEYS for name, _ in parameters) else ()),
    )


def frozen(model: Model, part: Part, plan: Plan) -> tuple[Stored, ...]:
    """What is not trained of a part, as it is stored."""
    if not plan.peft.any:
        return ()
    size = DTYPE_BYTES[plan.precision.master if mixed(model, part, plan) else plan.compute_dtype]
    ends = 4 if plan.peft.upcasts else size
    peft = plan.peft.at(number_of(part))
    return tuple(
        stored(prod(shape), shape[-1], plan.peft.stored, size)
        if _is_quantised(name, shape)
        else stored(prod(shape), shape[-1], "compute", ends)
        for name, shape in model.parameter_shapes(part)
        if not peft.trains(name)
    )


def mixed(model: Model, part: Part, plan: Plan) -> bool:
    """One flat vector holds the part with something to train: it has one dtype, and autograd makes one gradient of it.

    torch/distributed/fsdp/_flat_param.py: _validate_tensors_to_flatten, _use_unsharded_views.
    """
    if not plan.mixes_units:
        return False
    unit: tuple[Part, ...] = _ENDS if part in _ENDS else (part,)
    return plan.peft.at(number_of(part)).tunes(name for one in unit for name, _ in model.parameter_shapes(one))


def mixed_with(model: Model, parameter: str, plan: Plan) -> bool:
    """The same of the part that has the parameter."""
    parts = (*_ENDS, *dict.fromkeys(model.body)) if plan.mixes_units else ()
    has = (one for one in parts if any(name == parameter for name, _ in model.parameter_shapes(one)))
    return any(mixed(model, one, plan) for one in has)


def trained_numel(model: Model, plan: Plan, *, stored: bool = False) -> int:
    """Elements of all that a rank's part of the model has to train; a tied matrix counts once. stored: in the master dtype's."""
    if not plan.peft.any:
        return model.num_parameters
    size = pair_size(plan) if stored else 1

    def numel(part: Part) -> int:
        return sum(prod(shape) * (size if ".lora_" in name else 1) for name, shape in trained(model, part, plan))

    body = whole_body(model, plan)
    of = {kind: numel(kind) for kind in dict.fromkeys(body)}
    return sum(map(numel, _ENDS)) + sum(of[kind] for kind in body)


def model_flop(model: Model, plan: Plan) -> int:
    """FLOP of a step, forward and backward: 6 a trained matrix's element and token, 4 a frozen one's (no weight gradient).

    Layers below all that is trained have their forward alone: 2, and a third of attention's; so has a frozen tower.
    """
    saved, idle = 0, 0
    layers = Counter(kind for kind in whole_body(model, plan) if plain(kind) not in TOWER_KINDS)
    for kind, count in layers.items() if plan.peft.any else ():
        peft, still = plan.peft.at(number_of(kind)), FORWARD_SUFFIX in kind
        frozen_numel = sum(_per_token(model, *one) for one in model.parameter_shapes(kind) if not peft.trains(one[0]))
        saved += count * frozen_numel * (2 if still else 1)
        idle += count * still
    if plan.peft.any and not model.num_classes and not plan.peft.at(None).trains("lm_head.weight"):
        saved += model.vocab_size * model.d_model
    seen = model.tower_flop
    of_one = (model.model_flop_per_sequence(plan.attended_len) - 3 * seen) * plan.seq_len // plan.attended_len
    attention = of_one - 6 * (model.num_matmul_parameters * plan.seq_len + model.numel_per_sequence)
    spared = 2 * attention * idle // (3 * model.num_layers)
    seen *= 3 if plan.peft.trains(TOWER_WEIGHT) else 1
    return (of_one - 2 * saved * plan.seq_len - spared + seen) * plan.global_batch_size


def _per_token(model: Model, name: str, shape: tuple[int, ...]) -> int:
    """Elements of a matrix that a token meets: of routed experts, those it is sent to."""
    if len(shape) < 2 or name == "mamba.conv.weight":
        return 0
    routed = model.experts is not None and name.startswith("experts.")
    return model.experts.top_k * prod(shape[1:]) if routed and model.experts is not None else prod(shape)


def frozen_bytes(model: Model, plan: Plan) -> int:
    """Bytes of all frozen tensors of a rank's part of the model, whole, with their scales."""
    parts = (*_ENDS, *whole_body(model, plan))
    return sum(one.size + sum(one.beside) for part in parts for one in frozen(model, part, plan))


_ENDS: Final[tuple[Part, ...]] = ("embedding", "head")


def _is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Linear layers are; embeddings, heads, norms, routers and biases are not."""
    everywhere = PeftPlan(method="lora")
    return len(shape) > 1 and everywhere.adapts(name.removesuffix(".weight"))


def _modules(parameters: tuple[Parameter, ...], plan: Plan) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(module, shape of its weight) of matrices; Megatron's joint layers are one module."""
    weights = {
        name.removesuffix(".weight"): shape for name, shape in parameters if len(shape) > 1 and name.endswith(".weight")
    }
    for joint, parts in _JOINED if plan.traits.core_layers else ():
        if all(part in weights for part in parts):
            rows, width = sum(weights[part][0] for part in parts), weights[parts[0]][1]
            weights = {joint: (rows, width), **{name: shape for name, shape in weights.items() if name not in parts}}
    yield from weights.items()


def pair_size(plan: Plan) -> int:
    """Elements of the master dtype that one of a pair takes: 2 of 16 bits where it is stored in fp32."""
    master = DTYPE_BYTES[plan.precision.master]
    return DTYPE_BYTES[plan.peft.master or plan.precision.master] // master


def _adapters(module: str, shape: tuple[int, ...], peft: PeftPlan) -> Iterator[Parameter]:
    if not peft.adapts(module):
        return
    *each, out, width = shape
    if peft.method == "ia3":
        scaled = width if module.endswith("down") else out  # peft scales what enters a feedforward layer
        yield f"{module}.ia3", (*each, scaled)
        return
    rank = peft.rank_of(module)
    yield f"{module}.lora_a", (*each, rank, width)
    yield f"{module}.lora_b", (*each, out, rank)
    if peft.method == "dora":
        yield f"{module}.magnitude", (*each, out)


def _prefix(kv_width: int, peft: PeftPlan) -> Iterator[Parameter]:
    """Keys and values ahead of a layer's own."""
    for name in ("k", "v") if peft.method == "prefix" else ():
        yield f"attention.prefix.{name}", (peft.prefix_tokens, kv_width)
