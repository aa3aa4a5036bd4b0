"""Mixers with a state, of hybrids: what a sequence keeps beside its cache, the scan of its prompt, the update by a token.

A state does not grow with the sequence. Decoding reads and writes it once a token, in the kernels of selective_state_update and
causal_conv1d_update (state-spaces/mamba, Dao-AILab/causal-conv1d, which vLLM and SGLang took over).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

from simulator.base.kernels import DTYPE_BYTES, Kernel
from simulator.spec.model import Model
from simulator.spec.model.hybrid import Mamba
from simulator.spec.software.stack import Stack
from simulator.studies.serving.batch import Batch
from simulator.studies.serving.blocks import ForwardOps, forward_blocks
from simulator.studies.serving.cost import Cost
from simulator.studies.serving.plan import InferencePlan
from simulator.studies.serving.shards import StageShard
from simulator.work.ops import Block
from simulator.work.ops.graph import stream

# Of an element of a state: fp32, as Nemotron-H's config.json asks (mamba_ssm_cache_dtype) and SGLang keeps all
_STATE_BYTES: Final = 4


def state_bytes(shard: StageShard, plan: InferencePlan) -> int:
    """Of one sequence on one GPU of a stage, in all of its mixers."""
    mamba = shard.part.mamba
    if mamba is None:
        return 0
    return shard.part.num_mixers * (_scanned_bytes(mamba) + _convolved_bytes(mamba, plan))


def _scanned_bytes(mamba: Mamba) -> int:
    return _STATE_BYTES * mamba.inner * mamba.state_dim


def _convolved_bytes(mamba: Mamba, plan: InferencePlan) -> int:
    """The last inputs of the convolution, all but one of its taps."""
    taps = 0 if mamba.kind == "lightning" else mamba.conv_kernel - 1
    return taps * mamba.convolved * DTYPE_BYTES[plan.compute_dtype]


class MixerCosts:
    """Prices of one GPU's mixers. price: of kernels, one after another."""

    def __init__(
        self,
        shards: Sequence[StageShard],
        plan: InferencePlan,
        stack: Stack,
        price: Callable[[Sequence[Kernel]], Cost],
    ) -> None:
        self._plan, self._stack, self._price = plan, stack, price
        self._counts = tuple(shard.part.num_mixers for shard in shards)
        self._shard = shards[0]

    def of(self, stage: int, batch: Batch) -> Cost:
        """What a stage's mixers do beside their products and norms."""
        count, mamba = self._counts[stage], self._shard.part.mamba
        if not count or mamba is None:
            return Cost()
        cost = self._price(self._update(mamba, batch.decodes)) if batch.decodes else Cost()
        pieces = sum(-(-chunk.new // mamba.chunk_size) for chunk in batch.chunks)
        for _, _, kernels, _ in self._scan.at(pieces) if pieces else ():
            cost += self._price(kernels)
        return cost.times(count)

    def _update(self, mamba: Mamba, count: int) -> tuple[Kernel, ...]:
        """Convolution and state of so many sequences by a token each."""
        each = DTYPE_BYTES[self._plan.compute_dtype]
        taken, given, kept = mamba.convolved, mamba.inner, _convolved_bytes(mamba, self._plan)
        state = count * _scanned_bytes(mamba)
        moved = (count * (kept + each * taken), count * (kept + each * taken))
        convolved = (stream("activation", *moved),) if kept else ()
        return (*convolved, stream("elementwise", state + count * each * (taken + given), state + count * each * given))

    @cached_property
    def _scan(self) -> ForwardOps:
        """For any number of the pieces that the scan cuts prompts into."""
        assert self._shard.part.mamba is not None
        size = self._shard.part.mamba.chunk_size
        kind = "mamba" if "mamba" in self._shard.part.layer_kinds else "both"
        one, two = (forward_blocks(self._shard, self._plan, self._stack, n * size)[kind] for n in (1, 2))
        return ForwardOps.of(_scans_of(one), _scans_of(two))


def _scans_of(block: Block) -> Block:
    return replace(block, ops=tuple(op for op in block.ops if op.category == "scan"))


def hybrid_notes(model: Model) -> tuple[str, ...]:
    """What an answer about a model with mixers rests on."""
    if model.mamba is None:
        return ()
    kept = "states of mixers are in fp32, read and written once a token at the speed of elementwise kernels"
    return (f"{kept}; none is found in a cache, so that prompts are computed whole",)
