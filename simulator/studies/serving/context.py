"""Decode context parallelism: GPUs that would hold the same keys and values hold a part of the tokens each.

As vLLM does it (`--decode-context-parallel-size`; vllm/v1/attention/ops/common.py, cp_lse_ag_out_rs): before attention the queries of
all heads in the group are gathered, each GPU attends with all of them to its own tokens, and results are weighted by their gathered
sums of exponents and added, each GPU keeping its own heads. Pieces of prompts behind cached ones do the same; of latents, the cached
ones are gathered instead.
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
    """Prices of what a stage exchanges around attention. layers: with attention, of each stage. price: seconds of a collective of the group."""

    def __init__(
        self,
        part: ModelShard,
        plan: InferencePlan,
        layers: Sequence[int],
        price: Callable[[Exchange], float],
        host_s: float,
    ) -> None:
        self._part, self._plan, self._layers = part, plan, layers
        self._price, self._host_s = price, host_s

    def of(self, stage: int, batch: Batch) -> Cost:
        """Of all layers of a stage."""
        if self._plan.dcp == 1:
            return Cost()
        found = [*self._around(batch.decodes), *self._of_pieces(batch)]
        seconds = summed((self._price(exchange) for exchange in found), 0.0)
        return Cost(exchange_s=seconds, host_s=self._host_s * len(found)).times(self._layers[stage])

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
