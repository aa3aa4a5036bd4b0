"""Context parallelism of decoding and of prompts: what GPUs exchange around attention and experts.

Of decoding GPUs that would hold the same keys and values hold a part of the tokens each, as vLLM does it (`--decode-context-parallel-size`; vllm/v1/attention/ops/common.py, cp_lse_ag_out_rs): before attention the queries of
all heads in the group are gathered, each GPU attends with all of them to its own tokens, and results are weighted by their gathered
sums of exponents and added, each GPU keeping its own heads. Pieces of prompts behind cached ones do the same; of latents, the cached
ones are gathered instead.

Of prompts each GPU computes two pieces, one from the beginning and one from the end, so that all have as many pairs of queries and
keys; keys and values (or latents) of all are gathered before they are cached, tokens before experts are chosen for them, and what
experts give is summed and dealt out (vllm/v1/worker/gpu/pcp_manager.py; github.com/vllm-project/vllm/pull/46570, /pull/28718). Sequences
that decode are computed by all, and gathered with the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from simulator.base.kernels import DTYPE_BYTES
from simulator.base.sums import summed
from simulator.parallel.model_shard import ModelShard
from simulator.studies.serving.batch import Batch
from simulator.studies.serving.cost import Cost
from simulator.studies.serving.plan import InferencePlan
from simulator.studies.serving.shards import cached_channels
from simulator.work.ops import Exchange


class ContextCosts:
    """Prices of what a stage exchanges. layers: with attention, and with experts, of each stage. price: seconds of a collective of the group."""

    def __init__(
        self,
        part: ModelShard,
        plan: InferencePlan,
        layers: Sequence[tuple[int, int]],
        price: Callable[[Exchange], float],
        host_s: float,
    ) -> None:
        self._part, self._plan, self._layers = part, plan, layers
        self._price, self._host_s = price, host_s

    def of(self, stage: int, batch: Batch) -> Cost:
        """Of all layers of a stage."""
        attention, experts = self._layers[stage]
        if self._plan.pcp > 1:
            tokens = batch.tokens_of(self._plan.pcp)
            cost = self._cost(_cached(self._part, self._plan, tokens)).times(attention)
            return cost + self._cost(_to_experts(self._part, self._plan, tokens)).times(experts)
        if self._plan.dcp == 1:
            return Cost()
        return self._cost([*self._around(batch.decodes), *self._of_pieces(batch)]).times(attention)

    def _cost(self, found: Sequence[Exchange]) -> Cost:
        seconds = summed((self._price(exchange) for exchange in found), 0.0)
        return Cost(exchange_s=seconds, host_s=self._host_s * len(found))

    def _of_pieces(self, batch: Batch) -> Iterator[Exchange]:
        later = [chunk for chunk in batch.chunks if chunk.cached]
        if later and self._part.latent is not None:
            size = cached_channels(self._part) * DTYPE_BYTES[self._plan.kv_dtype]
            yield Exchange(kind="all_gather", axis="tp", num_bytes=sum(chunk.cached for chunk in later) * size)
        else:
            yield from self._around(sum(chunk.new for chunk in later))

    def _around(self, tokens: int) -> Iterator[Exchange]:
        """Queries, sums of exponents in fp32, results; of so many tokens."""
        if not tokens:
            return
        part, each = self._part, DTYPE_BYTES[self._plan.compute_dtype]
        heads, latent = tokens * part.num_heads * self._plan.dcp, part.latent
        query = part.head_dim if latent is None else latent.kv_lora_rank + latent.qk_rope_head_dim
        result = part.head_dim if latent is None else latent.kv_lora_rank
        gathered = partial(Exchange, kind="all_gather", axis="tp")
        yield gathered(num_bytes=heads * query * each)
        yield gathered(num_bytes=4 * heads * self._plan.dcp)
        yield Exchange(kind="reduce_scatter", axis="tp", num_bytes=heads * result * each)


def _cached(part: ModelShard, plan: InferencePlan, tokens: int) -> list[Exchange]:
    """Keys and values of all GPUs' tokens, so many each."""
    size = plan.pcp * tokens * cached_channels(part) * DTYPE_BYTES[plan.compute_dtype]
    return [Exchange(kind="all_gather", axis="cp", num_bytes=size)]


def _to_experts(part: ModelShard, plan: InferencePlan, tokens: int) -> list[Exchange]:
    """Tokens and their routers' logits; and what the experts give."""
    count = part.experts.num_experts if part.experts else 0
    each = plan.pcp * tokens * DTYPE_BYTES[plan.compute_dtype]
    gathered = Exchange(kind="all_gather", axis="cp", num_bytes=each * (part.d_model + count))
    return [gathered, Exchange(kind="reduce_scatter", axis="cp", num_bytes=each * part.d_model)]


def gathered_bytes(part: ModelShard, plan: InferencePlan, tokens: int) -> int:
    """What a GPU holds of all GPUs' tokens, so many each, in a layer that gathers them."""
    if plan.pcp == 1:
        return 0
    found = [*_cached(part, plan, tokens), *(_to_experts(part, plan, tokens) if part.experts else ())]
    return int(max(exchange.num_bytes for exchange in found))
