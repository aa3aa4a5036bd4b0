"""StepCosts: seconds of one serving step on each pipeline stage, from the kernels, links and host of the training model.

A step computes n new tokens: one for each sequence that decodes, and pieces of prompts. What depends on n alone (all
products, streams and collectives of a layer) is priced once for each n, the head once for each number of rows, both
exactly. Attention depends on what is cached: a prompt's is priced exactly; that of decoding is read off a line between
two exact prices KEYS_APART keys a sequence apart, within 0.1 % of the exact one (tests/theory/test_inference_theory.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from math import inf
from typing import cast

from simulator.base.kernels import DTYPE_BYTES, Attention, Gemm, Kernel, launches
from simulator.base.remembered import made_once
from simulator.base.sums import summed
from simulator.parallel.mesh import GroupShape
from simulator.play.lower.fabric import bytes_sent_once
from simulator.play.lower.work import Clock
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.model import LayerKind, Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving.attention import KEYS_APART, AttentionCosts, refuse_unknown_speed
from simulator.studies.serving.batch import MOST_CAPTURED, Batch, busiest_rank, padded
from simulator.studies.serving.blocks import ForwardOps, encoder_blocks, forward_ops, head_ops
from simulator.studies.serving.context import ContextCosts
from simulator.studies.serving.cost import ClocksByUse, Cost
from simulator.studies.serving.groups import context_shape, own_all_reduce_s, pipeline_shape, tensor_shape
from simulator.studies.serving.kernels import multiplied, stored_as
from simulator.studies.serving.lora import lora_kernels
from simulator.studies.serving.mixers import MixerCosts
from simulator.studies.serving.plan import InferencePlan
from simulator.studies.serving.shards import (
    NO_ATTENTION,
    WIDE,
    cached_channels,
    kv_bytes_per_token,
    stage_shards,
    windows,
)
from simulator.studies.serving.speculation import draft_plan, tokens_a_step
from simulator.studies.serving.workload import Request
from simulator.work.collectives import collective_s
from simulator.work.ops import Exchange
from simulator.work.ops.graph import stream


class StepCosts:
    """Prices batches. One object a (model, plan, cluster, stack, calibration); everything is kept that was priced.

    pace: a factor on every time, for the ends of an interval. streamed: tokens are sent one by one; else answers whole.
    """

    pace = 1.0
    streamed = True

    def __init__(
        self,
        model: Model,
        plan: InferencePlan,
        cluster: Cluster,
        stack: Stack,
        calibration: Calibration,
        curves: LinkCurves,
    ) -> None:
        refuse_unknown_speed(stack)
        stack = stack.engine_on(cluster.device).on_host_of(cluster.device)
        self.model, self.plan, self.cluster, self.stack = model, plan, cluster, stack
        self._curves, self._ideal = curves, calibration.kind == "ideal"
        self._clock = Clock(cluster.device, calibration, stack)
        self._casts = stack.engine is None or stack.engine.casts == "separate"
        self._graphs = stack.engine.graphs(cluster.device, plan.tp) if stack.engine else ()
        self.ranks = plan.ranks
        self._multiplied = multiplied(cluster.device)
        self._each = plan.draft_tokens + 1 if plan.speculative != "none" else 1
        self.tokens_a_step = tokens_a_step(self._each - 1, plan.acceptance or 0.0)
        self._draft: StepCosts | None = None
        if plan.speculative == "draft" and plan.draft_model is not None:
            drafts = Model.load(plan.draft_model), draft_plan(plan)
            self._draft = StepCosts(*drafts, cluster, stack, calibration, curves)
        self._gap_s = calibration.overheads.launch_s
        self._elementwise = 1.0 if self._ideal else stack.elementwise_factor_on(cluster.device.architecture)
        self._clocks = ClocksByUse(self._clock)
        self.shards = stage_shards(model, plan)
        self._nccl = stack.software()
        self._linear: dict[int, tuple[dict[str, Cost], Clock]] = {}
        self._heads: dict[int, Cost] = {}
        self._images = {0: Cost()}
        self.attention = AttentionCosts(
            self.shards[0].part,
            plan,
            lambda tokens: self._linear_of(tokens)[1],
            stack,
            ideal=self._ideal,
            each=self._each,
        )
        self._mixers = MixerCosts(self.shards, plan, stack, self._streamed)
        routed = [shard.part.layer_kinds.count("layer") if model.experts else 0 for shard in self.shards]
        layers = list(zip(map(sum, self.layers_by_window), routed, strict=True))
        around = context_shape(plan, cluster) if plan.pcp > 1 else tensor_shape(plan, cluster, plan.dcp)
        self._tensor, price = tensor_shape(plan, cluster), partial(self._exchange_s, shape=around)
        self._context = ContextCosts(self.shards[0].part, plan, layers, price, stack.host.collective_s)
        self._exchanges: dict[tuple[str, int, GroupShape], float] = {}
        self._messages: dict[tuple[GroupShape, int], float] = {}
        self._captured: dict[int, tuple[float, ...]] = {}

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of the model's layers, in the order of `Batch.keys`."""
        return tuple(window for window, _ in windows(self.model, range(self.model.num_layers)))

    @cached_property
    def layers_by_window(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each stage with each window."""
        found = (dict(windows(self.model, shard.layers)) for shard in self.shards)
        return tuple(tuple(each.get(window, 0) for window in self.windows) for each in found)

    @property
    def overhead_s(self) -> float:
        """Host time before each step, while the devices wait. A machine without losses has none."""
        return 0.0 if self._ideal else self.pace * self.cluster.device.host_factor * self.stack.fitted.step_overhead_s

    @property
    def works_ahead(self) -> bool:
        """The host decides on a step while the one before it runs. A machine without losses decides in no time."""
        return not self._ideal and self.stack.engine is not None and self.stack.engine.overlapped

    def outside_s(self, request: Request) -> float:
        """Time of a request outside the queue."""
        engine = None if self._ideal else self.stack.engine
        return self.pace * (engine.request_s + engine.token_s * request.prompt_tokens) if engine else 0.0

    def idle_s(self, busy_s: float, sequences: int, decodes: int = 0) -> float:
        """What devices wait for the host before a step of so many sequences that takes them `busy_s`.

        decodes: of these. Where tokens are guessed, a step of one token each has its part of a step's wait.
        """
        engine, part = self.stack.engine, self.tokens_a_step if decodes else 1.0
        sequences = -(-sequences // self.ranks)
        if self._ideal or engine is None:
            return self.overhead_s / part
        sent_s = self.pace * self.cluster.device.host_factor * engine.sequence_s * sequences if self.streamed else 0.0
        hidden_s = part * busy_s if engine.overlapped else 0.0
        return (sent_s + max(0.0, self.overhead_s - hidden_s)) / part

    @property
    def front_s(self) -> tuple[float, float]:
        """What takes its front end so long: to let a request in, and to send a token."""
        engine, pace = self.stack.engine, self.pace * self.cluster.device.host_factor
        if self._ideal or engine is None:
            return 0.0, 0.0
        return pace * engine.accept_s, pace * engine.stream_s * self.streamed

    def moved_s(self, batch: Batch) -> float:
        """Blocks to the host's memory and back, over each GPU's own link, before the step begins."""
        if not (batch.out or batch.back) or (tier := self.cluster.host_tier) is None:  # which is slow to ask for
            return 0.0
        each = self.plan.block_size * max(kv_bytes_per_token(shard, self.plan) for shard in self.shards)
        return self.pace * each / self.ranks * (batch.out / tier.d2h_bytes_per_s + batch.back / tier.h2d_bytes_per_s)

    def changed(self, **values: float | bool) -> StepCosts:
        """The same with another `pace`, number of `ranks` (1: batches of one of them) or `streamed`. What was priced is shared: it knows none."""
        other = copy(self)
        vars(other).update(values)
        return other

    def graphed(self, batch: Batch) -> bool:
        """The step is launched as one CUDA graph."""
        largest = self._graphs[-1] if self._graphs else MOST_CAPTURED
        return self.plan.cuda_graphs and not batch.chunks and batch.decodes * self._each <= largest

    def stages_s(self, batch: Batch) -> tuple[float, ...]:
        """Seconds of the step on each pipeline stage, the message to the next one included."""
        batch = busiest_rank(batch, self.ranks)
        guessed = self._each > 1 and batch.decodes
        times = [self._guessed_s(batch)] if guessed else self._plain_s(batch)
        return tuple(self.pace * seconds for seconds in times)

    def _plain_s(self, batch: Batch) -> list[float]:
        if batch.chunks and batch.decodes and self.stack.engine is not None and self.stack.engine.prompts_apart:
            passes = replace(batch, chunks=()), replace(batch, decodes=0, keys=tuple(0 for _ in batch.keys))
            return [summed(stage) for stage in zip(*map(self._plain_s, passes), strict=True)]
        return self._graph_s(batch) if self.graphed(batch) else [self._seconds(cost) for cost in self._costs(batch)]

    def _guessed_s(self, batch: Batch) -> float:
        """One token of each sequence: its part of a step that verifies guesses, and of making them; and the pieces of prompts."""
        alone = replace(batch, chunks=())
        (verified_s,) = self._plain_s(alone)
        pieces_s = self._plain_s(batch)[0] - verified_s if batch.chunks else 0.0
        return pieces_s + (verified_s + self._seconds(self._guesses(alone))) / self.tokens_a_step

    def _guesses(self, batch: Batch) -> Cost:
        """What a step's guesses cost the devices: as many passes of what makes them."""
        count, guesses = batch.decodes, self._each - 1
        if self._draft is not None:
            context = batch.keys[0] // count
            seen = tuple(count * min(context, window or context) for window in self._draft.windows)
            (cost,) = self._draft.costs(Batch(decodes=count, keys=seen))
            return cost.times(guesses)
        if not self.plan.guesses_by_a_layer:
            return Cost()
        found, clock = self._linear_of(count)
        d = self.model.d_model
        joined = Gemm(m=count, n=d // self.plan.tp, k=2 * d, dtype=self.plan.compute_dtype)
        cost = found["embedding"] + found[self.shards[-1].part.layer_kinds[-1]] + self._head(count)
        more = Cost(gemm_s=clock.seconds(joined), attention_s=self.attention.decode_s(count, batch.keys[-1]))
        return (cost + more)._replace(host_s=0.0, gaps_s=0.0).times(guesses)

    def on_a_line(self, batch: Batch) -> int:
        """For how many steps from this one, which only decodes, what the device does is one line of the keys: 1 where that is not known."""
        if self.windows != (None,) or self.plan.attention_dp:
            return 1
        apart = KEYS_APART * batch.decodes
        return (apart - batch.keys[0] % apart) // batch.decodes + 1

    def _graph_s(self, batch: Batch) -> list[float]:
        """Stages of a step that only decodes: all but attention is kept by the number of sequences."""
        count = batch.decodes
        bases = self._captured.get(count)
        if bases is None:
            alone = Batch(decodes=count, keys=())
            found = (self._verifying(n, count) + self._beside(n, alone) for n in range(len(self.shards)))
            bases = self._captured[count] = tuple(cost.busy_s for cost in found)
        if len(batch.keys) == 1:
            each_s = self.attention.decode_s(count, batch.keys[0])
            return [base + layers * each_s for base, (layers,) in zip(bases, self.layers_by_window, strict=True)]
        seen_s = [self.attention.decode_s(count, keys) for keys in batch.keys]
        return [
            base + summed(n * seconds for n, seconds in zip(counts, seen_s, strict=True))
            for base, counts in zip(bases, self.layers_by_window, strict=True)
        ]

    def _verifying(self, stage: int, count: int) -> Cost:
        """All of a stage but attention, of a graph of so many sequences that decode."""
        return self._stage(stage, padded(count * self._each, self._graphs), count * self._each)

    def costs(self, batch: Batch) -> tuple[Cost, ...]:
        """The same in parts, before the larger of device and host is taken."""
        batch = busiest_rank(batch, self.ranks)
        found = self._costs(batch)
        if self._each == 1 or not batch.decodes:
            return found
        alone = replace(batch, chunks=())
        (verified,), part = self._costs(alone), 1 / self.tokens_a_step
        return (found[0] + verified.times(part - 1) + self._guesses(alone).times(part),)

    def _costs(self, batch: Batch) -> tuple[Cost, ...]:
        """Of a step that verifies what was guessed."""
        graphed, more = self.graphed(batch), (self._each - 1) * batch.decodes
        tokens = padded(batch.decodes + more, self._graphs) if graphed else batch.tokens_of(self.plan.pcp) + more
        found = []
        for stage, counts in enumerate(self.layers_by_window):
            cost = self._stage(stage, tokens, batch.rows + more) + self._beside(stage, batch)
            for count, window, keys in zip(counts, self.windows, batch.keys, strict=True):
                if batch.decodes and count:
                    cost += self._booked(self.attention.decode_s(batch.decodes, keys)).times(count)
                if batch.chunks and count:
                    cost += self._booked(self.attention.prefill_s(batch, window)).times(count)
            found.append(cost._replace(host_s=0.0, gaps_s=0.0) if graphed else cost)
        return tuple(found)

    def _booked(self, seconds: float) -> Cost:
        return Cost(attention_s=seconds, host_s=self.stack.host.launch_s, gaps_s=self._gap_s)

    def _seconds(self, cost: Cost) -> float:
        """The host runs ahead of the device, so the slower of the two decides. An ideal host costs nothing."""
        return cost.busy_s if self._ideal else max(cost.busy_s + cost.gaps_s, cost.host_s)

    def _stage(self, stage: int, tokens: int, rows: int) -> Cost:
        """All of a stage but attention."""
        shard = self.shards[stage]
        found = self._linear_of(tokens)[0]
        cost = Cost()
        for kind, count in self._kinds[stage]:
            cost += found[kind].times(count)
        if shard.holds_embedding:
            cost += found["embedding"]
        if shard.holds_head:
            cost += self._head(rows)
        else:
            cost += Cost(exchange_s=self._message_s(stage, tokens), host_s=self.stack.host.collective_s)
        return cost

    def _beside(self, stage: int, batch: Batch) -> Cost:
        """What depends on whose tokens they are, but for attention itself."""
        begun = sum(chunk.first for chunk in batch.chunks) if stage == 0 and self.model.sees else 0
        return self._mixers.of(stage, batch) + self._context.of(stage, batch) + self._encoded(begun)

    def _encoded(self, requests: int) -> Cost:
        """The images of so many requests, each of the tower's blocks one by one."""
        found = self._images.get(requests)
        if found is None:
            found = Cost()
            for block, times in encoder_blocks(self.model, self.plan, self.stack, requests):
                seen = [kernel for op in block.ops for kernel in op.forward if isinstance(kernel, Attention)]
                one = self._ops(ForwardOps.of(block, block), 1, self._clock) + Cost(host_s=self.stack.host.layer_s)
                found += (one + self._booked(summed(map(self._clock.seconds, seen), 0.0))).times(times)
            self._images[requests] = found
        return found

    def _linear_of(self, tokens: int) -> tuple[dict[str, Cost], Clock]:
        """The embedding and a layer of each kind without its attention kernel, for so many new tokens; and their clock."""
        found = self._linear.get(tokens)
        if found is None:
            clock = self._clocks.of(self._forward[self.shards[0].part.layer_kinds[0]], tokens)
            channels = tokens * cached_channels(self.shards[0].part)
            sizes = (channels * DTYPE_BYTES[dtype] for dtype in (self.plan.compute_dtype, self.plan.kv_dtype))
            store = self._kernels((stream("copy", *sizes),), clock)  # K and V into their blocks
            store += Cost(host_s=self.stack.host.layer_s)
            costs = {"embedding": self._ops(self._forward["embedding"], tokens, clock)}
            for kind in self._forward.keys() - costs.keys():
                costs[kind] = self._ops(self._forward[kind], tokens, clock, narrow=True)
                costs[kind] += Cost(host_s=self.stack.host.layer_s) if kind in NO_ATTENTION else store
                if self.plan.lora_rank:
                    adapters = lora_kernels(self.shards[0].part, cast("LayerKind", kind), self.plan, tokens)
                    costs[kind] += self._kernels(adapters, clock)
            found = self._linear[tokens] = (costs, clock)
        return found

    def _head(self, rows: int) -> Cost:
        if not rows:
            return Cost()  # pieces of prompts only
        return made_once(self._heads, rows, lambda: self._ops(self._head_ops, rows, self._clock))

    @cached_property
    def _forward(self) -> dict[str, ForwardOps]:
        """Of the whole model on one stage: it has layers of every kind."""
        shard = stage_shards(self.model, self.plan.model_copy(update={"pp": 1}))[0]
        return forward_ops(shard, self.plan, self.stack)

    @cached_property
    def _kinds(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """Layers of each kind on each stage."""
        return tuple(tuple(Counter(shard.part.layer_kinds).items()) for shard in self.shards)

    @cached_property
    def _head_ops(self) -> ForwardOps:
        return head_ops(self.shards[-1], self.plan, self.stack)

    def _ops(self, block: ForwardOps, tokens: int, clock: Clock, *, narrow: bool = False) -> Cost:
        """A block's forward. narrow: its weights are stored as the plan says."""
        total = Cost()
        for name, category, kernels, exchanges in block.at(tokens):
            factor = 1.0 if category == "gemm" else self._elementwise
            rows = tokens if name == "experts.up" else None  # quantised before they become rows of experts
            as_is, weights = not narrow or name in WIDE, self.plan.weights
            stored = kernels if as_is else stored_as(kernels, weights, self._multiplied, cast=self._casts, rows=rows)
            total += self._kernels(stored, clock, factor)
            for exchange in exchanges:
                waits_s = 0.0 if self._ideal else self.stack.fitted.collective_wait_s
                total += Cost(
                    exchange_s=self._exchange_s(exchange), host_s=self.stack.host.collective_s, gaps_s=waits_s
                )
        return total

    def _kernels(self, kernels: Sequence[Kernel], clock: Clock, factor: float = 1.0) -> Cost:
        gemm_s = summed((clock.seconds(kernel) for kernel in kernels if isinstance(kernel, Gemm)), 0.0)
        stream_s = summed((clock.seconds(kernel) for kernel in kernels if not isinstance(kernel, Gemm)), 0.0)
        count = summed(map(launches, kernels))
        host_s, gaps_s = self.stack.host.launch_s * count, self._gap_s * count
        return Cost(gemm_s=factor * gemm_s, stream_s=factor * stream_s, host_s=host_s, gaps_s=gaps_s)

    def _streamed(self, kernels: Sequence[Kernel]) -> Cost:
        return self._kernels(kernels, self._clock, self._elementwise)

    def _exchange_s(self, exchange: Exchange, shape: GroupShape | None = None) -> float:
        """Among tp's ranks, or a group of that shape."""
        shape = shape or self._tensor
        key = (exchange.kind, exchange.num_bytes, shape)
        if key not in self._exchanges:
            sent = bytes_sent_once(exchange, shape)
            seconds = collective_s(exchange.kind, sent, shape, self.cluster, curves=self._curves, nccl=self._nccl)
            engine = None if self._ideal else self.stack.engine
            own_s = inf if self._ideal else own_all_reduce_s(exchange, shape, self.cluster, self.stack)
            self._exchanges[key] = min(float(seconds) * (engine.nccl_factor if engine else 1.0), own_s)
        return self._exchanges[key]

    def _message_s(self, stage: int, tokens: int) -> float:
        """A stage's result to the next one: [n, d_model] in the compute dtype."""
        size, shape = tokens * self.model.d_model * DTYPE_BYTES[self.plan.compute_dtype], self._links[stage]
        if (shape, size) not in self._messages:
            spent = collective_s("send_recv", size, shape, self.cluster, curves=self._curves, nccl=self._nccl)
            self._messages[shape, size] = float(spent)
        return self._messages[shape, size]

    @cached_property
    def _links(self) -> tuple[GroupShape, ...]:
        """Of each stage and the next."""
        return tuple(pipeline_shape(self.plan, self.cluster, stage) for stage in range(self.plan.pp - 1))
