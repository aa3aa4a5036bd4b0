"""How far off are predictions of servers? Regenerates docs/accuracy-serving.md from a table of measured ones.

    python experiments/accuracy_serving.py --jobs 2              # some ten minutes

measured/serving.csv.gz holds figures of six public sources, each row with its place. Nothing is fitted here.

One source names each figure by its users (`_c16_`). Of some it knows none (`_c_`), and the table has the batch size that a
planner chose instead: these are refused here, whatever their errors. LMDeploy's page says 0.2.0 of figures that stand in it,
letter by letter, since it said 0.1.0a1 (December 2023): they are predicted as that.
"""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
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
  closed loops name none. Their mean holds the first round, which all users begin at once: with 5 requests a user the bias of vLLM's
  rows would be +46 %, with 20 it would be -32 %, with 10 (as predicted) it is -7 %; with lengths drawn from 0.8 of the stated ones it
  would be -24 %, and SGLang's on H100 -80 %.
- **Lengths behind a mean.** The online rows of TensorRT-LLM give mean lengths of data sets. With all 500 requests at once the longest
  answer decides, which the mean does not know.
- **Time per token of TensorRT-LLM 1.x** is too fast where answers are short. What users, their first tokens and times per token add up to
  says that a step with a prompt takes at least 24 ms for 32 layers and 42 for 64, on any number of GPUs: the host's time, of which 10 and
  24 are predicted. With 600 us a layer instead of 200, which its calibration rows ask too, Llama 8B's time per token would be 4.3 % off
  (5.5), but first tokens of the source's TensorRT-LLM rows 14.8 % (12.1): users then wait for more steps than the three that they do.
  Qwen3-32B's prompts in fp8 take 15 to 35 % longer besides, on one and two GPUs, for a reason that is not found.
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
    args = parser.parse_args(argv)
    table = read_measured(args.table)
    report = run(replace(table, rows=tuple(map(as_run, table.rows))), jobs=args.jobs).as_json()
    args.out.write_text("\n".join(page(report, args.date, args.table)), encoding="utf-8")
    return 0


def as_run(row: Any) -> Any:  # noqa: ANN401  any row of a table
    """The row, without users that its source does not know, and with the software that it ran."""
    if not isinstance(row, ServingRow):
        return row
    if row.source.startswith("InternLM/lmdeploy"):
        return replace(row, stack="lmdeploy-2023")
    return replace(row, concurrency_or_rate="") if "_c_tp" in row.id else row


def page(report: dict[str, Any], date: str, table: Path = TABLE) -> Iterator[str]:
    """The lines of the page. table: that was predicted."""
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
    yield _grids(rows, table)
    yield WHY
    yield "## Rows not predicted\n"
    for row in rows:
        if row["status"] not in ("ok", "calibration"):
            yield f"- `{row['id']}`: {row['reason']}"
    yield ""


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
