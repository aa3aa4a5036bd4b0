"""Attention of one layer against the cache: prompts exactly, decoding off lines between exact prices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from simulator.base.errors import StackError
from simulator.base.kernels import DTYPE_BYTES, Gemm
from simulator.parallel.model_shard import ModelShard
from simulator.play.lower.work import Clock
from simulator.spec.model.experts import Latent
from simulator.spec.software.stack import Stack
from simulator.studies.serving.batch import Batch, causal_pairs, padded
from simulator.studies.serving.kernels import FP8_PROMPTS, TILE_ROWS, CachedAttention
from simulator.studies.serving.plan import InferencePlan
from simulator.studies.serving.shards import cached_channels

KEYS_APART = 64  # a sequence, between the exact prices of decoding


class AttentionCosts:
    """Prices of one GPU's heads. clock_of: the clock of a step of so many new tokens. stack: whose kernels run; ideal: without losses.

    each: queries of a sequence that decodes, all of which see its keys.
    """

    def __init__(
        self,
        part: ModelShard,
        plan: InferencePlan,
        clock_of: Callable[[int], Clock],
        stack: Stack,
        *,
        ideal: bool,
        each: int = 1,
    ) -> None:
        self._each = each
        self._part, self._plan, self._clock_of = part, plan, clock_of
        self._rows = 0 if ideal else TILE_ROWS.get(stack.attention.kernel, 0)
        fp8 = stack.engine is not None and stack.engine.fp8_prompts and plan.kv_dtype == "fp8"
        self._prompt_speed = FP8_PROMPTS if fp8 and not ideal else 1.0
        self._decodes: dict[tuple[int, int], float] = {}

    def decode_s(self, count: int, keys: int) -> float:
        """`count` sequences that see `keys` keys together."""
        apart = KEYS_APART * count
        node, rest = divmod(keys, apart)
        low = self._node_s(count, node)
        return low + (self._node_s(count, node + 1) - low) * rest / apart if rest else low

    def _node_s(self, count: int, node: int) -> float:
        if (count, node) not in self._decodes:
            self._decodes[count, node] = self.decode_exactly_s(count, max(count, node * KEYS_APART * count))
        return self._decodes[count, node]

    def decode_exactly_s(self, count: int, keys: int) -> float:
        """The exact price that `decode_s` reads its lines from. Latents are attended to as they are, one head of keys."""
        part, plan, each = self._part, self._plan, self._each
        keys = -(-keys // plan.dcp)
        clock = self._clock_of(padded(count * each) if plan.cuda_graphs else count * each)
        cached_bytes = keys * cached_channels(part) * DTYPE_BYTES[plan.kv_dtype]
        kernel = self._kernel(
            count, each, 2 * keys // count, pairs=keys * each, queries=count * each, cached_bytes=cached_bytes
        )
        if part.latent is not None:
            rank = part.latent.kv_lora_rank
            width = rank + part.latent.qk_rope_head_dim
            kernel = replace(kernel, num_kv_heads=1, head_dim=width, v_head_dim=rank)
        kernel = replace(kernel, num_heads=kernel.num_heads * plan.dcp)
        return clock.seconds(replace(kernel, rows=-(-self._rows // each)))

    def prefill_s(self, batch: Batch, window: int | None) -> float:
        """All pieces of prompts of a step, or a GPU's part of them. Cached latents, and others' new ones, become keys and values first."""
        pairs = sum(causal_pairs(chunk, window) for chunk in batch.chunks)
        whole = sum(chunk.new for chunk in batch.chunks)
        keys = sum(min(chunk.cached + chunk.new, chunk.new + (window or chunk.cached)) for chunk in batch.chunks)
        count, part, plan = len(batch.chunks), self._part, self._plan
        clock = self._clock_of(batch.tokens_of(plan.pcp))
        new, pairs = batch.tokens_of(plan.pcp) - batch.decodes, -(-pairs // plan.pcp)
        if part.latent is None:
            cached_bytes, widened_s = keys * cached_channels(part) * DTYPE_BYTES[plan.kv_dtype], 0.0
        else:
            cached_bytes = keys * (part.q_width + part.o_width) * DTYPE_BYTES[plan.compute_dtype]
            widened_s = self._widened_s(sum(chunk.cached for chunk in batch.chunks) + whole - new, part.latent, clock)
        seq_kv = max(1, 2 * pairs // new)
        kernel = self._kernel(count, -(-new // count), seq_kv, pairs=pairs, queries=new, cached_bytes=cached_bytes)
        return clock.seconds(kernel) / self._prompt_speed + widened_s

    def _widened_s(self, tokens: int, latent: Latent, clock: Clock) -> float:
        """Expanding cached latents to keys and values, again for every later piece."""
        if not tokens:
            return 0.0
        width = self._part.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        return clock.seconds(Gemm(m=tokens, n=width, k=latent.kv_lora_rank, dtype=self._plan.compute_dtype))

    def _kernel(
        self, batch: int, seq_q: int, seq_kv: int, *, pairs: int, queries: int, cached_bytes: int
    ) -> CachedAttention:
        part = self._part
        return CachedAttention(
            batch=batch,
            seq_q=seq_q,
            seq_kv=seq_kv,
            num_heads=part.num_heads,
            num_kv_heads=part.num_kv_heads,
            head_dim=part.head_dim,
            v_head_dim=0 if part.latent is None else part.latent.v_head_dim,
            causal=True,
            direction="forward",
            dtype=self._plan.compute_dtype,
            pairs=pairs,
            queries=queries,
            cached_bytes=cached_bytes,
        )


def refuse_unknown_speed(stack: Stack) -> None:
    """Attention over a cache needs a fused kernel and its curve. Raises StackError."""
    backend = stack.attention
    if backend.kernel == "math" or backend.states_speed("forward"):
        why = "has no fused kernel" if backend.kernel == "math" else "states speeds of whole sequences only"
        problem = f"attention of {stack.name} {why}: what reading a cache costs cannot be told"
        raise StackError.at("inference: stack", problem, 'stack = "vllm-2025"')
