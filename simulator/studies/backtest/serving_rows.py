"""A row of a table of servers -> model, plan, cluster, stack and load; what they cannot express is refused by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf
from typing import Any, Final, Literal

from simulator.base.errors import PlanError
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.hosts import usual_host
from simulator.spec.model import Model
from simulator.spec.model.families import presets_of
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.rows import ServingRow
from simulator.studies.serving import InferencePlan, engine_of, with_defaults

# What a benchmark at maximum load plays where nothing says it: TensorRT-LLM's overview of performance (v0.17) plays 1,000 to
# 30,000 requests by length, some 6.4 million tokens of prompts and answers.
_TOKENS_AT_MOST_LOAD: Final = 6_400_000
_FEWEST: Final = 1000
_ROUNDS: Final = 10  # requests of a closed loop over its users, as InferenceX plays them
_OPEN: Final = 1000  # requests of an open loop

_WEIGHTS: Final = {
    "": "bf16", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp8": "fp8", "w8a8-fp8": "fp8",
    "int8": "int8", "w8a16": "int8", "int4": "int4", "w4a16": "int4", "awq": "int4", "gptq": "int4", "gptq-int4": "int4",
}  # fmt: skip
_KV: Final = {
    "": "auto",
    "auto": "auto",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}
_RATE: Final = re.compile(r"(inf|[0-9]*\.?[0-9]+)\s*(?:requests?|req|reqs?|queries)?\s*(?:/|per )\s*s(?:ec|econd)?|(?:qps|rate)\s*=?\s*(inf|[0-9]*\.?[0-9]+)",
                          re.IGNORECASE)  # fmt: skip
_COUNTED: Final = re.compile(r"(?<![\w/.,])([0-9][0-9,]*) requests?\b(?!\s*/)")

Figure = Literal["ttft", "tpot", "itl", "latency", "output_rate", "token_rate", "request_rate"]
# The words of a metric, the longest first; a time may have `_mean`, `_median` or `_p99` behind it.
_FIGURES: Final[tuple[tuple[str, Figure], ...]] = (
    (r"\(prompt\+output tokens\)/total time|total_(?:token_)?throughput", "token_rate"),
    (r"output_(?:token_)?throughput", "output_rate"),
    (r"request_throughput", "request_rate"),
    (r"ttft|time_to_first_token", "ttft"),
    (r"tpot|time_per_output_token", "tpot"),
    (r"itl|inter_token_latency", "itl"),
    (r"(?:request_|e2e_|end_to_end_)?latency|e2el?", "latency"),
)
_STATISTIC: Final = re.compile(r"_(mean|avg|median|p[0-9]{1,2}(?:\.[0-9]+)?)(?![a-z0-9])")
_UNITS: Final = {
    "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "tokens/s": 1.0, "token/s": 1.0, "tok/s": 1.0, "requests/s": 1.0, "req/s": 1.0,
    "tokens/s/gpu": 0.0, "tok/s/gpu": 0.0,
}  # fmt: skip
_TIMES: Final = ("s", "ms", "us", "µs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """users: of a closed loop, each with one request at a time; 0: requests come at `rate` a second, inf: all at once.

    alone: a batch that nothing follows. requests: how many are played.
    """

    users: int
    rate: float
    alone: bool
    requests: int
    prompt: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which figure of the load, over which statistic (mean, or a percentile), and what one of its unit is in SI."""

    figure: Figure
    percentile: float | None
    unit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A row made concrete. other: the plan with the engine's defaults, where a launch for the row's users has others."""

    model: Model
    plan: InferencePlan
    cluster: Cluster
    stack: Stack
    load: Load
    asked: Asked
    other: InferencePlan | None = None


def resolve(row: ServingRow) -> Server:
    """By docs/reference/serving-table.md. Raises RefusedError with the reason, or what model, plan and cluster refuse."""
    asked, load = asked_of(row), load_of(row)
    stack = stack_of(row)
    gpus = row.n_gpus or (row.tp or 1) * (row.pp or 1) * (row.dp or 1)
    cluster = cluster_of(row.gpu, gpus)
    model = _model(row.model, load.prompt + load.output)
    plan = _plan(row, stack, gpus, load, (cluster.device, model))
    if asked.unit == 0.0:
        asked = replace(asked, unit=float(gpus))
    launched = _launched(plan, stack, load)
    return Server(
        model=model,
        plan=launched or plan,
        other=plan if launched else None,
        cluster=cluster,
        stack=stack,
        load=load,
        asked=asked,
    )


def asked_of(row: ServingRow) -> Asked:
    """The metric in words that are known, and its unit."""
    figure = next((name for words, name in _FIGURES if re.match(words, row.metric.strip(), re.IGNORECASE)), None)
    if figure is None:
        raise RefusedError(
            ("metric", f"{row.metric!r} is none that is predicted: ttft, tpot, itl, latency, throughputs")
        )
    unit = _UNITS.get(row.unit.strip().casefold())
    timed = figure in ("ttft", "tpot", "itl", "latency")
    if unit is None or (row.unit.strip().casefold() in _TIMES) != timed:
        wanted = "s or ms" if timed else "tokens/s or requests/s"
        raise RefusedError(("unit", f"{row.unit!r} of {row.metric}: {wanted}"))
    if "per_gpu" in row.metric:
        unit = 0.0
    found = _STATISTIC.search(row.metric)
    word = found[1] if found else "mean"
    percentile = {"mean": None, "avg": None, "median": 50.0}.get(word, float(word[1:]) if word[0] == "p" else None)
    return Asked(figure=figure, percentile=percentile, unit=unit)


def load_of(row: ServingRow) -> Load:
    """What arrives when."""
    if row.input_tokens is None or row.output_tokens is None:
        raise RefusedError(("lengths", "input_tokens or output_tokens is blank"))
    text, alone = row.concurrency_or_rate.strip(), "static" in row.metric
    lengths = row.input_tokens + row.output_tokens
    users, rate = 0, inf
    if re.fullmatch(r"[0-9]{1,7}", text) and int(text):
        users = int(text)
    elif found := _RATE.search(text):
        rate = float(found[1] or found[2])
    elif not re.match(r"inf|all at once|max", text, re.IGNORECASE):
        raise RefusedError(("load", f"concurrency_or_rate {text!r} is no number of users, no rate and not inf"))
    usual = _OPEN if rate < inf else max(_FEWEST, _TOKENS_AT_MOST_LOAD // lengths)
    usual = (users if alone else _ROUNDS * users) if users else usual
    requests = row.num_requests or _counted(row.notes) or usual
    return Load(
        users=users, rate=rate, alone=alone, requests=requests, prompt=row.input_tokens, output=row.output_tokens
    )


def _counted(notes: str) -> int | None:
    """`500 requests` among the remarks."""
    found = _COUNTED.search(notes)
    return int(found[1].replace(",", "")) if found else None


def stack_of(row: ServingRow) -> Stack:
    """The one that the row names, or the one that describes its engine and version."""
    if row.stack:
        return Stack.load(row.stack)
    return engine_of(f"{row.engine} {row.engine_version}")


def _plan(row: ServingRow, stack: Stack, gpus: int, load: Load, on: tuple[Device, Model]) -> InferencePlan:
    """on: the device, and the model."""
    tp, pp = row.tp or (1 if row.pp else gpus), row.pp or 1
    dp = row.dp or max(1, gpus // (tp * pp))
    if tp * pp * dp != gpus:
        raise RefusedError(("degrees do not multiply to n_gpus", f"tp {tp} × pp {pp} × dp {dp}, not {gpus}"))
    unknown = [
        f"{column} {word!r}"
        for column, word, words in (("precision", row.precision, _WEIGHTS), ("kv_precision", row.kv_precision, _KV))
        if word.strip().casefold() not in words
    ]
    if unknown:
        raise RefusedError(("precision", f"{', '.join(unknown)}: {', '.join(filter(None, _WEIGHTS))}"))
    at_most = not load.users and load.rate == inf and stack.engine is not None
    given: dict[str, Any] = {
        **(stack.engine.launch_plan if at_most and stack.engine else {}),
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "weights": _WEIGHTS[row.precision.strip().casefold()],
        **({"kv_cache": _KV[row.kv_precision.strip().casefold()]} if row.kv_precision else {}),
        "max_model_len": load.prompt + load.output,
        "stack": stack.name,
        **({"experts": "dealt"} if (row.ep or 1) > 1 else {}),
    }
    return with_defaults(InferencePlan.parse(given, f"line {row.line}", PlanError), stack, *on)


def _launched(plan: InferencePlan, stack: Stack, load: Load) -> InferencePlan | None:
    """As a benchmark of so many users launches the engine; None where that is how it is launched anyway."""
    spare = stack.engine.launch_tokens if stack.engine else None
    users = ceil(load.users / plan.dp)
    tokens = load.prompt + users + (spare or 0)
    if not plan.chunked_prefill:
        tokens = max(tokens, load.prompt + load.output)  # a whole sequence must fit a step
    if spare is None or load.alone or not users or tokens >= (plan.max_batched_tokens or inf):
        return None
    most = min(users, plan.max_sequences)
    return plan.model_copy(update={"max_batched_tokens": tokens, "max_sequences": most})


@cache
def _model(name: str, tokens: int) -> Model:
    """With as many positions as what ran: rotary ones are stretched for longer sequences."""
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
