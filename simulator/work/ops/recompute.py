"""Which ops run again in the backward of a checkpointed block."""

from __future__ import annotations

from simulator.spec.model import FORWARD_SUFFIX
from simulator.spec.plan import Plan, RecomputeModule
from simulator.spec.software.stack import Stack
from simulator.work.ops.core import Block, Op


def recompute_ops(block: Block, plan: Plan, stack: Stack) -> tuple[Op, ...]:
    """Ops of `block` that run again before its backward, in order; the caller decides which blocks are checkpointed.

    full, every_k: the whole block; with `early_stop` (non-reentrant checkpoints) it ends once every saved tensor
    exists, so the last product and the residual sum after it do not run. selective: hand-fused stacks (Megatron)
    recompute the plan's modules, by default the core of attention only, which is nothing where the kernel is tiled;
    others keep the outputs of products and of attention, and run the rest.
    """
    if plan.recompute.mode == "none" or FORWARD_SUFFIX in block.name or block.name.startswith("joint"):
        return ()
    if plan.recompute.mode == "selective" and stack.traits.recomputes_modules:
        modules = frozenset(plan.recompute.modules)
        return tuple(op for number, op in enumerate(block.ops) if modules & _modules(block, number))
    ops = block.ops[: _end(block)] if stack.kernels.early_stop else block.ops
    if plan.recompute.mode == "selective":
        return tuple(op for op in ops if not op.selective_save)
    return ops


_LATENT = ("q_norm", "q_up", "q.rotated", "kv_norm", "kv_up", "keys and values")


def _modules(block: Block, number: int) -> set[RecomputeModule]:
    """Megatron's modules that an op is part of (transformer_config.py, recompute_modules).

    core_attn: what an unfused kernel makes; layernorm: the norms of the stream; mla_up_proj: from the low ranks to queries,
    keys and values; moe_act: the activation between the experts' products, and the clamps before it; mlp, moe: all between the second norm and the
    residual, of a layer without experts or with them.
    """
    op = block.ops[number]
    names = [other.name for other in block.ops]
    found: set[RecomputeModule] = set()
    if op.category == "attention" and not op.selective_save:
        found.add("core_attn")
    if op.name in ("norm_1", "norm_2"):
        found.add("layernorm")
    if op.name in _LATENT and "kv_up" in names:
        found.add("mla_up_proj")
    mixture = "router" in names
    if mixture and op.name in ("clamped", "activation"):
        found.add("moe_act")
    if op.name.startswith("shared"):
        found.add("shared_experts")
    if "norm_2" in names and names.index("norm_2") < number < names.index("residual_2"):
        found.add("moe" if mixture else "mlp")
    return found


def cached_tensors(block: Block, again: tuple[Op, ...], plan: Plan, stack: Stack) -> frozenset[str]:
    """Outputs that the selective policy keeps beside what ops save for their backward.

    Eagerly the policy keeps all that it names, as it does not know who will ask. A compiler sees both passes, and
    keeps what the backward or the recomputation reads: not the result of the block's last product.
    """
    if plan.recompute.mode != "selective" or stack.traits.recomputes_modules:
        return frozenset()
    saved = {tensor.name for op in block.ops if op.selective_save for tensor in op.outputs}
    if stack.traits.plans_saved:
        saved &= {name for op in block.ops for name in op.saved} | {name for op in again for name in op.inputs}
    return frozenset(saved)


def _end(block: Block) -> int:
    """Index after the last op that must run so that all saved tensors exist."""
    last = max((i for i, op in enumerate(block.ops) if op.saved), default=-1)
    if last < 0:
        return 0
    return last if block.ops[last].saves_only_inputs else last + 1
