"""How far off are predictions of servers? Regenerates docs/accuracy-serving.md from a table of measured ones.

    python experiments/accuracy_serving.py --jobs 2 [--counted]  # some ten minutes

measured/serving.csv.gz holds figures of six public sources, each row with its place. Nothing is fitted here.

One source names each figure by its users (`_c16_`). Of some it knows none (`_c_`), and the table has the batch size that a
planner chose instead: these are refused here, whatever their errors. LMDeploy's page says 0.2.0 of figures that stand in it,
letter by letter, since it said 0.1.0a1 (December 2023): they are predicted as that.

The closed loops on H100 say themselves over how many requests their means were taken (`REQUESTS_A_USER`). Played are ten a user, and
with `--counted` as many as they say.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from simulator.formats.readers.measured_table import read_measured, read_serving
from simulator.spec.software.stack import Stack
from simulator.studies.backtest import run
from simulator.studies.backtest.rows import ServingRow
from simulator.studies.backtest.scores import error_score, spearman
from simulator.studies.backtest.text import percent

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "experiments" / "measured" / "serving.csv.gz"
PAGE = ROOT / "docs" / "accuracy-serving.md"
Row = dict[str, Any]

# GenAI-Perf rounds each request's times to whole nanoseconds (genai-perf/genai_perf/profile_data_parser), so a mean times the number
# of its requests is a whole number: of rows of these engines on H100 with so many requests a user, but with no fewer
# (tests/unit/test_accuracy_serving.py). Of some runs one or two answers were empty, which it leaves out.
REQUESTS_A_USER = {"vllm": 10, "sglang": 20, "trtllm": 20}
MOST_REQUESTS = 2000

HEAD = """# Accuracy of serving

Predicted against measured figures of servers, on {date}. Regenerate with `python experiments/accuracy_serving.py`. The table is
`experiments/measured/serving.csv.gz`, as it was published; its columns and rules are in [the reference](reference/serving-table.md),
and `shardwise backtest` takes it as it is, but for {unstated} rows whose users nobody states (below).

err = predicted / measured − 1. *median* and *p90* are those of |err|, *bias* is the median of err, *rank* is Spearman's correlation
of predicted with measured, *in 90 %* the share of rows inside their 90 % interval. Two baselines are fitted on a random half of each
group's rows and tested on the other half, 20 times: *one efficiency* over a machine without losses, and *two terms* (products, bytes
read). They have seen measurements of the same group; the prediction has not. Cells of baselines are median / p90.

Coefficients that rows decided (those rows are not scored): {calibration}.

{counts}
"""

# What a reader asks -> which rows answer it, and the target (median, p90) where there is one
QUESTIONS: tuple[tuple[str, Callable[[Row], bool], tuple[float, float] | None], ...] = (
    ("maximum throughput", lambda r: r["load"].startswith("inf ("), (0.06, 0.15)),
    ("maximum throughput, 16 bits", lambda r: r["load"].startswith("inf (") and "A100" in r["gpu"], (0.06, 0.15)),
    ("maximum throughput, fp8", lambda r: r["load"].startswith("inf (") and "H100" in r["gpu"], (0.06, 0.15)),
    ("static batches", lambda r: "static" in r["metric"], (0.06, 0.12)),
    ("time to first token at a rate", lambda r: _at_a_rate(r) and r["metric"].startswith("ttft"), (0.08, 0.20)),
    ("time per token at a rate", lambda r: _at_a_rate(r) and r["metric"].startswith("itl"), (0.08, 0.20)),
    ("closed loop, time per token", lambda r: r["load"].isdigit() and r["metric"].startswith("tpot"), (0.10, 0.20)),
    (
        "closed loop, time to first token",
        lambda r: r["load"].isdigit() and r["metric"].startswith("ttft"),
        (0.10, 0.20),
    ),
    ("closed loop, throughput", lambda r: r["load"].isdigit() and r["unit"] == "tokens/s", None),
)

GRIDS = """
## Which layout

Rows that differ in nothing but GPUs and degrees form a grid. Its best layout is the one with the most per GPU (tokens a second, or
batches a second); of {n} grids with three layouts or more, the best one is predicted to be the best in {first}, and among the first
two in {two}.

| source | grids | first | first two |
|---|--:|--:|--:|
{lines}
"""

RATES = """
## Rates of closed loops

Users over the time of a request (the first token, and the time per token of all others), of servers whose rows have both.

| engine | GPU | n | median | p90 | bias | rank |
|---|---|--:|--:|--:|--:|--:|
{lines}
"""

UNDESCRIBED = """
## As if nobody had described the engine

Every fourth row (by the SHA-256 of its id) of engines other than vLLM, predicted as rows of an engine that no stack describes are: by
today's vLLM (`vllm-2026`, which does what most engines do) at its defaults, as nobody knows how such an engine is launched. The interval spans both orders of prompts (they join
the steps that decode, or come first) and less memory for the cache, and is wider by sigmas that `experiments/unnamed_engines.py` takes
from described engines; what the others' say of each stands in `topologies/calibrations/unknown-engine.json`. *Width* is how far its
upper end lies above the prediction, in the median.

| engine | n | median | p90 | bias | in 90 % | width |
|---|--:|--:|--:|--:|--:|--:|
{lines}
"""
PART = 4  # of the rows that are predicted so

WHY = """
## Why rows miss

- **Time to first token in a closed loop.** Users with equally long answers stay in step and wait for each other's prompts; a few per
  cent of difference part them, and their wait falls to a fraction. It also depends on the tokens that a launch gives a step, which no
  row says, and by which the wait varies threefold. Predicted are users in step, on engines whose steps have room for one prompt beside
  those that decode; the interval spans users apart, the engine's own default, a smaller cache, and a factor of 1.5 for cold kernels and
  the client.
- **Fast steps of many users under TensorRT-LLM 1.x** (Llama 8B on 4 and 8 GPUs, 64 users and more) fill its front end, one Python process
  that lets requests in and sends tokens: first tokens come after 0.7 to 2 s where steps alone would give 0.1 to 0.2 s. It is predicted by two
  coefficients of six calibration rows; which users then stay in step with which is not, so that single rows miss by half. With 8 users
  some first rounds wait seconds more than any step explains.
- **What clients send** is read from their code (`topologies/clients`): 6 requests a user in LMDeploy's rows, which name theirs. The other
  closed loops name none. aiconfigurator ships them among InferenceX's figures; their notes name measurements of its own, and those on
  H100 look like GenAI-Perf's: times 10 requests a user vLLM's means are whole nanoseconds, times 20 (2,000 at most) SGLang's and
  TensorRT-LLM's, times fewer they are not. Played are ten a user: vLLM's number, but half of the others'. With twenty (`--counted`)
  times per token of TensorRT-LLM get nearer (7.3 / 12.0 %, with ten 7.6 / 13.3), and its first tokens come a sixth too early (20.5 /
  49.4 %, with ten 12.1 / 56.6), as the first round, which all users begin at once, weighs half as much: two errors cancel there. SGLang's
  hardly change, as its users stay in step. Qwen3-32B's first tokens would be right (9.3 / 28 %) if a request took 20 ms to be let in, not
  10, which six calibration rows deny.
- **What waits and what decodes.** Rates of closed loops (above) are nearer than their first tokens. On H200 SGLang's rates are
  3 % off in the median, and first tokens come between 2.8 times as early as predicted and 2.3 times as late: prompts are computed
  as fast as predicted, but at other times. Steps of prompts and answers together (`--enable-mixed-chunk`, in aiconfigurator's launches)
  were tried, and miss by -93 to +184 %. So was its front end as the one process that it is (it takes requests, tokenises and streams on
  one core: sgl-project/sglang#6553), with 4 ms a request and 44 us a token: the times per token that calibrate it (512 users, 1,000
  tokens, a rate that levels off at 22,000 tokens a second) would lie within 6 % (12), and first tokens of eight GPUs 32 % too early
  instead of 56, but answers of 100 tokens begin twice as late as measured and go on a quarter too fast (13 %).
- **Lengths behind a mean.** The online rows of TensorRT-LLM give mean lengths of data sets. With all 500 requests at once the longest
  answer decides, which the mean does not know. Intervals span exponentially distributed lengths besides: with them throughput of
  202 and 214 tokens would be 2 % too high at 16 requests a second (12 as it is), 0 at 32 (24), and 8 to 14 % too low at once (76 %
  too high). Answers of 256 tokens fit as they are: such lengths would make them 34 to 40 % too low.
- **Time per token of TensorRT-LLM 1.x** is too fast where answers are short. What users, their first tokens and times per token add up to
  says that a step with a prompt takes at least 24 ms for 32 layers and 42 for 64, on any number of GPUs: the host's time, of which 10 and
  24 are predicted. With 600 us a layer instead of 200, which its calibration rows ask too, Llama 8B's time per token would be 4.3 % off
  (5.5), but first tokens of the source's TensorRT-LLM rows 14.8 % (12.1): users then wait for more steps than the three that they do.
  Qwen3-32B's prompts in fp8 take 15 to 35 % longer besides, on one and two GPUs, for a reason that is not found.
  aiconfigurator's launches leave the cache 0.8 of what is free, which is played. To a step they give 1,500 tokens more than is played, and
  until December 2025 they switched the overlap scheduler off where one server does both (cli/templates/trtllm/dynamo and cli/backends,
  then generator/backends/trtllm.py; since then generator/rule_plugin/trtllm.rule leaves it on, whatever its templates' default). How
  these rows were launched nobody says. Played as until December, with the host's four times fitted anew on the six calibration
  rows (0.5 ms between steps, 9 us a sequence, 6.7 ms a request and 59 us a token at the front end), times per token are 4.2 / 12.9 % off
  (7.6 / 13.3) and rates 5.4 / 21.2 (8.0 / 20.5), but first tokens 25.3 / 51.5 (12.1 / 56.6), a quarter too early, ranked at 0.76
  (0.85) and 84 % of them held (93). With twenty requests a user they are 24 % too early too.
  Played with 600 us and as many requests as its rows say, rates of Llama 8B are 4.0 / 9.3 % off (5.8 / 22.5), of Qwen3-32B 8.2 / 14.7
  (8.8 / 14.4), and first tokens 23 / 60 %: how fast the server is, is known then, not which of its users wait.
- **fp8 at maximum load** is some 4 % too slow; memory-starved plans (70 billion weights on one GPU) 6 to 11 %, as a few hundred MB
  more cache are a tenth more sequences.
- **H20**: its products and its decoding attention are bound by tiles of 64 rows, whatever the batch; their speed there is a prior.
- **Users that nobody states.** Seven configurations with 4,000 tokens a prompt (TensorRT-LLM 1.2, vLLM 0.12) have no measured number of
  users in their source; the table has the batch size that a planner chose instead. They are refused here, and were scored until November
  2026. Fewer users ran: with 48 of them on two GPUs weights and 16-bit cache alone take 13 ms a step to read, and 11.6 ms a token
  were measured.
- **LMDeploy's rows** are of 0.1.0a1, whatever version their page names: it computes all prompts that wait, and decodes once then. Which
  threads of the client come together is not known, and 16 prompts of 2,048 tokens took half as long again as 16 times one.
"""


def _grids(rows: Sequence[Row], table: Path) -> str:
    """How often the best layout of a grid is found."""
    scored = {row["id"]: row for row in rows if row["scored"]}
    found: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for one in read_serving(table):
        if isinstance(one, ServingRow) and one.id in scored and ("static" in one.metric or "throughput" in one.metric):
            same = (one.source, one.model, one.gpu, one.precision, one.input_tokens, one.output_tokens, one.metric)
            row, gpus = scored[one.id], one.n_gpus or 1
            each = ((row["predicted"], row["measured"]), gpus)
            values = [1 / v / each[1] if "static" in one.metric else v / each[1] for v in each[0]]
            found.setdefault((*same, one.concurrency_or_rate), []).append((values[0], values[1]))
    grids = [(key[0], _place(pairs)) for key, pairs in found.items() if len(pairs) > 2]
    lines = []
    for source in sorted({source for source, _ in grids}):
        places = [place for name, place in grids if name == source]
        lines.append(f"| {source} | {len(places)} | {_share(places, 1)} | {_share(places, 2)} |")
    places = [place for _, place in grids]
    return GRIDS.format(n=len(grids), first=_share(places, 1), two=_share(places, 2), lines="\n".join(lines))


def _rates(rows: Sequence[Row], table: Path) -> str:
    """How far off the requests a second of closed loops are."""
    lengths = {one.id: one.output_tokens or 0 for one in read_serving(table) if isinstance(one, ServingRow)}
    first = {row["id"].removesuffix("-ttft"): row for row in rows if row["scored"] and row["id"].endswith("-ttft")}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        before = first.get(row["id"].removesuffix("-tpot"))
        if before is None or not row["scored"] or not row["id"].endswith("-tpot"):
            continue
        times = [before[which] + (lengths[row["id"]] - 1) * row[which] for which in ("predicted", "measured")]
        found.setdefault((row["engine"], row["gpu"]), []).append((1 / times[0], 1 / times[1]))
    return RATES.format(
        lines="\n".join(f"| {name} | {gpu} | {_rate(found[name, gpu])} |" for name, gpu in sorted(found))
    )


def _rate(pairs: Sequence[tuple[float, float]]) -> str:
    score, rank = error_score([mine / other - 1 for mine, other in pairs]), spearman(*zip(*pairs, strict=True))
    errors = percent(score.median_abs_error), percent(score.p90_abs_error), percent(score.bias, signed=True)
    return " | ".join((str(score.n), *errors, "–" if rank is None else f"{rank:.2f}"))


def _place(pairs: Sequence[tuple[float, float]]) -> int:
    """Of the best by measurement, among what is predicted."""
    predicted, _ = max(pairs, key=lambda pair: pair[1])
    return 1 + sum(value > predicted for value, _ in pairs)


def _share(places: Sequence[int], most: int) -> str:
    return percent(sum(place <= most for place in places) / max(1, len(places)))


def _at_a_rate(row: Row) -> bool:
    return "/s" in row["load"] and not row["load"].lower().startswith("inf")


def main(argv: Sequence[str] | None = None) -> int:
    """Predict, or take a report, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--date", default=dt.datetime.now(tz=dt.UTC).date().isoformat())
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--counted", action="store_true", help="as many requests as a row's figures say")
    args = parser.parse_args(argv)
    table = read_measured(args.table)
    rows = map(as_run, table.rows)
    played = tuple(map(counted, rows) if args.counted else rows)
    report = run(replace(table, rows=played), jobs=args.jobs).as_json()
    unnamed = [undescribed(row) for row in table.rows if isinstance(row, ServingRow) and _in_part(row)]
    alone = run(replace(table, rows=tuple(unnamed)), jobs=args.jobs).as_json()
    args.out.write_text("\n".join(page(report, args.date, args.table, alone["rows"])), encoding="utf-8")
    return 0


def _in_part(row: ServingRow) -> bool:
    part = int(hashlib.sha256(row.id.encode()).hexdigest(), 16) % PART
    return part == 0 and not row.engine.casefold().startswith("vllm")


def undescribed(row: ServingRow) -> ServingRow:
    """The row as that of an engine which no stack describes, measured by the same client."""
    users = as_run(row).concurrency_or_rate
    return replace(
        row,
        concurrency_or_rate=users,
        stack="",
        engine="",
        engine_version="",
        client=row.client or f"{row.engine} {row.notes}",
    )


def as_run(row: Any) -> Any:  # noqa: ANN401  any row of a table
    """The row, without users that its source does not know, and with the software that it ran."""
    if not isinstance(row, ServingRow):
        return row
    if row.source.startswith("InternLM/lmdeploy"):
        return replace(row, stack="lmdeploy-2023")
    return replace(row, concurrency_or_rate="") if "_c_tp" in row.id else row


def counted(row: Any) -> Any:  # noqa: ANN401  any row of a table
    """The row, with the number of requests that its figures say."""
    users = row.concurrency_or_rate if isinstance(row, ServingRow) and row.gpu == "h100_sxm" else ""
    if not users.isdigit() or row.engine not in REQUESTS_A_USER:
        return row
    return replace(row, num_requests=min(REQUESTS_A_USER[row.engine] * int(users), MOST_REQUESTS))


def page(report: dict[str, Any], date: str, table: Path = TABLE, alone: Sequence[Row] = ()) -> Iterator[str]:
    """The lines of the page. table: that was predicted. alone: rows that were predicted without a description."""
    rows = report["rows"]
    status = {
        word: sum(row["status"] == word for row in rows) for word in ("ok", "calibration", "refused", "bad", "failed")
    }
    counts = ", ".join(f"{count} {word}" for word, count in status.items())
    unstated = sum(row["id"].startswith("aic-") and "_agg_" in row["id"] and "_c_tp" in row["id"] for row in rows)
    yield HEAD.format(
        unstated=unstated, date=date, calibration=_calibration(rows), counts=f"{len(rows)} rows: {counts}."
    )
    yield "## At a glance\n\n**Bold** misses its target.\n"
    yield "| question | n | median | p90 | target | bias | rank | in 90 % |\n|---|--:|--:|--:|--:|--:|--:|--:|"
    for name, question, target in QUESTIONS:
        yield _line(name, [row for row in rows if row["scored"] and question(row)], target)
    yield "\n## By source\n"
    yield from _groups(report["groups"])
    yield _rates(rows, table)
    yield _grids(rows, table)
    yield _undescribed(alone, {row["id"]: row["engine"] for row in rows})
    yield WHY
    yield "## Rows not predicted\n"
    for row in rows:
        if row["status"] not in ("ok", "calibration"):
            yield f"- `{row['id']}`: {row['reason']}"
    yield ""


def _undescribed(rows: Sequence[Row], engines: dict[str, str]) -> str:
    """How far off rows are without a description, and how wide their intervals."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["scored"]:
            found.setdefault(engines[row["id"]], []).append(row)
    every = [(name, found[name]) for name in sorted(found)]
    lines = [
        f"| {name} | {_unnamed(rows)} |"
        for name, rows in (*every, ("all", [row for rows in found.values() for row in rows]))
    ]
    return UNDESCRIBED.format(lines="\n".join(lines))


def _unnamed(rows: Sequence[Row]) -> str:
    score = error_score([row["error"] for row in rows])
    held = sum(row["low"] <= row["measured"] <= row["high"] for row in rows) / max(1, len(rows))
    width = median(row["high"] / row["predicted"] - 1 for row in rows) if rows else None
    cells = percent(score.median_abs_error), percent(score.p90_abs_error), percent(score.bias, signed=True)
    return " | ".join((str(score.n), *cells, percent(held), percent(width)))


def _calibration(rows: Sequence[Row]) -> str:
    names = sorted({row["stack"] for row in rows if row["stack"]})
    known = {row["id"] for row in rows}
    counts = ((name, sum(one in known for one in Stack.load(name).fitted.calibration_runs)) for name in names)
    return ", ".join(f"`{name}` on {count} rows" for name, count in counts if count)


def _line(name: str, rows: Sequence[Row], target: tuple[float, float] | None) -> str:
    score = error_score([row["error"] for row in rows])
    aims = target or (1.0, 1.0)
    cells = [
        f"**{percent(value)}**" if value is not None and value > aim else percent(value)
        for value, aim in zip((score.median_abs_error, score.p90_abs_error), aims, strict=True)
    ]
    rank = spearman([row["predicted"] for row in rows], [row["measured"] for row in rows])
    inside = sum(row["low"] <= row["measured"] <= row["high"] for row in rows) / max(1, len(rows))
    wanted = " / ".join(f"{100 * aim:.0f} %" for aim in target) if target else "–"
    rank_text = "–" if rank is None else f"{rank:.2f}"
    return f"| {name} | {score.n} | {cells[0]} | {cells[1]} | {wanted} | {percent(score.bias, signed=True)} | {rank_text} | {percent(inside)} |"


def _groups(groups: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| source | engine | GPU | metric | n | median | p90 | bias | rank | in 90 % | one efficiency | two terms |"
    yield "|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for group in groups:
        rank = "–" if group["spearman"] is None else f"{group['spearman']:.2f}"
        cells = [
            *(group[name] for name in ("source", "engine", "gpu", "metric")),
            str(group["n"]),
            *(percent(group[name]) for name in ("median_abs_error", "p90_abs_error")),
            percent(group["bias"], signed=True),
            rank,
            percent(group["coverage_90"]),
            *(f"{percent(one['median_abs_error'])} / {percent(one['p90_abs_error'])}" for one in group["baselines"]),
        ]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
