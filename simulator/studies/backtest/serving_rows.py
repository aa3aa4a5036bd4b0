"""A row of a table of servers -> model, plan, cluster, stack and load; what they cannot express is refused by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf
from typing import Any, Final, Literal

from simulator.base.errors import PlanError
from simulator.base.presets import facts
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.hosts import usual_host
from simulator.spec.model import Model
from simulator.spec.model.families import presets_of, weights_of
from simulator.spec.software.client import ClientLoad, client_of
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.rows import ServingRow
from simulator.studies.serving import InferencePlan, engine_of, with_defaults
from simulator.studies.serving.workload import MOST_PLAYED

# What a benchmark at maximum load plays where nothing says it: TensorRT-LLM's overview of performance (v0.17) plays 1,000 to
# 30,000 requests by length, some 6.4 million tokens of prompts and answers.
_TOKENS_AT_MOST_LOAD: Final = 6_400_000
_FEWEST: Final = 1000
_ROUNDS: Final = 10  # requests of a closed loop over its users, as InferenceX plays them
_OPEN: Final = 1000  # requests of an open loop

_WORDS: Final = facts(__file__, "serving_words")
_WEIGHTS: Final[dict[str, str]] = _WORDS["weights"]
_KV: Final[dict[str, str]] = _WORDS["kv"]
SECONDS: Final[dict[str, float]] = _WORDS["seconds"]
_UNITS: Final[dict[str, float]] = SECONDS | _WORDS["rates"]
_NUMBER: Final = r"(inf|[0-9]{1,15}(?:\.[0-9]{1,15})?|\.[0-9]{1,15})"  # a cell may be a megabyte of digits
_RATE: Final = re.compile(rf"(?<![0-9.]){_NUMBER}\s*(?:(?:requests?|req|reqs?|queries)?\s*(?:/|per )\s*s(?:ec|econd)?|[qr]ps\b)|(?:[qr]ps|rate)\s*[=:]?\s*{_NUMBER}",
                          re.IGNORECASE)  # fmt: skip
_USERS: Final = re.compile(r"(?:(?:max[ _-]?)?(?:concurren(?:cy|t)|users?|clients?|batch(?:[ _-]size)?|bs|c)\s*[=:]?\s*)?([0-9]{1,7})(?:\.0+)?"
                           r"(?:\s*(?:users?|clients?|sessions?|streams?|concurrent(?: requests?| users?)?))?", re.IGNORECASE)  # fmt: skip
_AT_ONCE: Final = re.compile(
    r"inf\b|infinit|all at once|all requests|offline|unlimited|max(?:imum)?(?: load)?$", re.IGNORECASE
)
_COUNTED: Final = re.compile(r"(?<![\w/.,])([0-9][0-9,]{0,18}) requests?\b(?!\s*/)")
_MEANS: Final = re.compile(r"\blengths are means\b", re.IGNORECASE)

Figure = Literal["ttft", "tpot", "itl", "latency", "output_rate", "token_rate", "request_rate"]
_BEFORE: Final = r"(?:mean|avg|average|median|p[0-9.]+|std|min|max)"  # that may stand before them
_STATISTIC: Final = re.compile(r"\b(mean|avg|average|median|p[0-9]{1,2}(?:\.[0-9]+)?)\b")
_NO_STATISTIC: Final = re.compile(r"\b(?:std(?:dev)?|min(?:imum)?|max(?:imum)?|var(?:iance)?|[0-9]+(?:\.[0-9]+)?)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """users: of a closed loop, each with one request at a time; 0: requests come at `rate` a second, inf: all at once.

    alone: a batch that nothing follows. requests: how many are played. shortest: tokens of the shortest over those stated;
    lengths are any whole numbers from there on, equally likely. means: they are means of lengths that vary, nobody says how.
    """

    users: int
    rate: float
    alone: bool
    requests: int
    prompt: int
    output: int
    shortest: float = 1.0
    means: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedMetric:
    """Which figure of the load, over which statistic (mean, or a percentile), and what one of its unit is in SI."""

    figure: Figure
    percentile: float | None
    unit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A row made concrete.

    other: the plan in another way that may have run: with the engine's defaults, where a launch for the row's users has others; or, of
    an engine that nobody described, with prompts in steps of their own.
    """

    model: Model
    plan: InferencePlan
    cluster: Cluster
    stack: Stack
    load: Load
    metric: RequestedMetric
    other: InferencePlan | None = None

    @property
    def waits(self) -> bool:
        """The figure is how long users of a closed loop wait for each other's prompts."""
        return self.load.users > 0 and self.metric.figure == "ttft"


def resolve(row: ServingRow) -> Server:
    """By docs/reference/serving-table.md. Raises RefusedError with the reason, or what model, plan and cluster refuse."""
    metric, load = metric_of(row), load_of(row)
    stack = stack_of(row)
    gpus = row.n_gpus or (row.tp or 1) * (row.pp or 1) * (row.dp or 1) + _for_prompts(row)
    cluster = cluster_of(row.gpu, gpus)
    model = _model(row.model, load.prompt + load.output)
    plan = _plan(row, stack, gpus, load, (cluster.device, model))
    if metric.unit == 0.0:
        metric = replace(metric, unit=float(gpus))
    chosen, other = _ways(plan, stack, load)
    return Server(
        model=model,
        plan=chosen,
        other=other,
        cluster=cluster,
        stack=stack,
        load=load,
        metric=metric,
    )


def metric_of(row: ServingRow) -> RequestedMetric:
    """The metric's figure, statistic and unit. Raises RefusedError for an unknown one."""
    words = re.sub(r"[^a-z0-9.]+", " ", row.metric.casefold()).strip()
    figure = next(
        (name for known, name in _WORDS["figures"] if re.match(rf"(?:{_BEFORE} )?(?:{known})\b", words)), None
    )
    if figure is None:
        known = "ttft, tpot, itl, latency, output_throughput, total_throughput, request_throughput"
        raise RefusedError(("metric", f"{row.metric!r} is none that is predicted: {known}"))
    unit = _UNITS.get(row.unit.strip().casefold())
    timed = figure in ("ttft", "tpot", "itl", "latency")
    if unit is None or (row.unit.strip().casefold() in SECONDS) != timed:
        expected = "s or ms" if timed else "tokens/s or requests/s"
        raise RefusedError(("unit", f"{row.unit!r} of {row.metric}: {expected}"))
    found, other = _STATISTIC.search(words), _NO_STATISTIC.search(words)
    if timed and other and not found:
        raise RefusedError(
            ("metric", f"{other[0]!r} of {row.metric!r}: mean, median and percentiles (p99) are predicted")
        )
    word = found[1] if found else "mean"
    percentile = 50.0 if word == "median" else float(word[1:]) if word[0] == "p" else None
    return RequestedMetric(figure=figure, percentile=percentile, unit=0.0 if "per gpu" in words else unit)


def load_of(row: ServingRow) -> Load:
    """The load: arrivals and lengths of requests."""
    if row.input_tokens is None or row.output_tokens is None:
        raise RefusedError(("lengths", "input_tokens or output_tokens is blank"))
    text, alone = row.concurrency_or_rate.strip(), "static" in row.metric
    lengths = row.input_tokens + row.output_tokens
    users, rate = 0, inf
    if (found := _USERS.fullmatch(text.replace(",", ""))) and int(found[1]):
        users = int(found[1])
    elif found := _RATE.search(text):
        rate = float(found[1] or found[2])
    elif not _AT_ONCE.match(text):
        raise RefusedError(("load", f"concurrency_or_rate {text!r} is no number of users, no rate and not inf"))
    usual = _OPEN if rate < inf else max(_FEWEST, _TOKENS_AT_MOST_LOAD // lengths)
    client = _client(row) if users and not alone else ClientLoad()
    usual = (users if alone else client.requests(users) or _ROUNDS * users) if users else usual
    requests = row.num_requests or _counted(row.notes) or usual
    if requests > MOST_PLAYED:
        raise RefusedError(("load", f"{requests:,} requests: at most {MOST_PLAYED:,} are played"))
    return Load(
        users=users,
        rate=rate,
        alone=alone,
        requests=requests,
        prompt=row.input_tokens,
        output=row.output_tokens,
        shortest=client.shortest if row.shortest is None else row.shortest,
        means=_MEANS.search(row.notes) is not None,
    )


def _client(row: ServingRow) -> ClientLoad:
    """The requests of the benchmark client that a row names, if a file describes it."""
    client = client_of(row.client or f"{row.engine} {row.notes}")
    return client.load if client else ClientLoad()


def _counted(notes: str) -> int | None:
    """`500 requests` among the remarks."""
    found = _COUNTED.search(notes)
    return int(found[1].replace(",", "")) if found else None


def stack_of(row: ServingRow) -> Stack:
    """The stack that the row names, or the one that describes its engine and version."""
    if row.stack:
        return Stack.load(row.stack)
    return engine_of(f"{row.engine} {row.engine_version}")


def _for_prompts(row: ServingRow) -> int:
    """GPUs of engines that only compute prompts."""
    if row.prefill_tp and not row.prefill_dp:
        raise RefusedError(("degrees", f"prefill_tp = {row.prefill_tp} of engines for prompts, and no prefill_dp"))
    return (row.prefill_tp or 1) * (row.prefill_dp or 0)


def _plan(row: ServingRow, stack: Stack, gpus: int, load: Load, on: tuple[Device, Model]) -> InferencePlan:
    """on: the device, and the model."""
    prompts = _for_prompts(row)
    answers = gpus - prompts
    tp, pp = row.tp or (1 if row.pp else max(1, answers)), row.pp or 1
    dp = row.dp or max(1, answers // (tp * pp))
    if tp * pp * dp != answers:
        more = f" and {prompts} for prompts" if prompts else ""
        raise RefusedError(("degrees do not multiply to n_gpus", f"tp {tp} × pp {pp} × dp {dp}{more}, not {gpus}"))
    stated, kv = (re.sub(r"[\s_]+", "-", word.strip().casefold()) for word in (row.precision, row.kv_precision))
    weights = weights_of(row.model) or stated if stated in ("", "auto") else stated
    unknown = [
        f"{column} {word!r}"
        for column, word, words in (("precision", weights, _WEIGHTS), ("kv_precision", kv, _KV))
        if word not in words
    ]
    if unknown:
        raise RefusedError(("precision", f"{', '.join(unknown)}: {', '.join(filter(None, _WEIGHTS))}"))
    at_most = not load.users and load.rate == inf and stack.engine is not None
    given: dict[str, Any] = {
        **(stack.engine.launch_plan if at_most and stack.engine else {}),
        "tp": tp,
        "pp": pp,
        "dp": dp,
        **({"prefill_tp": row.prefill_tp or 1, "prefill_dp": row.prefill_dp} if prompts else {}),
        "weights": _WEIGHTS[weights],
        **({"kv_cache": _KV[kv]} if kv else {}),
        "max_model_len": load.prompt + load.output,
        "stack": stack.name,
        **({"experts": "dealt"} if (row.ep or 1) > 1 else {}),
    }
    return with_defaults(InferencePlan.parse(given, f"line {row.line}", PlanError), stack, *on)


def _ways(plan: InferencePlan, stack: Stack, load: Load) -> tuple[InferencePlan, InferencePlan | None]:
    """How the plan likely runs for users, and how it may besides: as benchmarks with that many launch the engine, and as it is.

    How an undescribed engine is launched is not known, nor whether its prompts join the steps that decode, as in most engines, or come
    first (vLLM until 0.7, TGI, SGLang).
    """
    engine, users = stack.engine, ceil(load.users / plan.dp)
    if engine is None or load.alone or not users:
        return plan, None
    if stack.known == "unknown":
        return plan, plan.model_copy(update={"mixed_steps": False})
    launch, tokens = dict(engine.users_plan), load.prompt + users + (engine.launch_tokens or 0)
    if not plan.chunked_prefill:
        tokens = max(tokens, load.prompt + load.output)  # a whole sequence must fit a step
    if engine.launch_tokens is not None and tokens < (plan.max_batched_tokens or inf):
        launch |= {"max_batched_tokens": tokens, "max_sequences": min(users, plan.max_sequences)}
    return (plan.model_copy(update=launch), plan) if launch else (plan, None)


@cache
def _model(name: str, tokens: int) -> Model:
    """The model with enough positions for the load: rotary ones are extended for longer sequences."""
    presets = presets_of(name)
    if not presets:
        raise RefusedError(("model", f"{name!r} is no model of topologies/models"))
    model = Model.load(presets[0])
    return model if tokens <= model.max_positions else model.model_copy(update={"max_positions": tokens})


@cache
def cluster_of(gpu: str, gpus: int) -> Cluster:
    """The GPU's usual machine, as many nodes as needed; its other GPUs are idle."""
    node = Cluster.load(usual_host(Device.resolve(gpu))).gpus_per_node
    return Cluster.synthesise(gpu, node * ceil(gpus / node))
