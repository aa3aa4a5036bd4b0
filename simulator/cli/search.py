"""`shardwise search`: the best plan of a model on a machine, out of every legal one."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from simulator.base.errors import Collected, Fault, InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.processes import cores
from simulator.base.units import counted, format_seconds, parse_count
from simulator.cli.finite import FiniteRange
from simulator.cli.options import (
    FILE,
    answer_options,
    cluster_option,
    fixed_by,
    image_options,
    loaded_prices,
    price_options,
    print_answer,
    print_status,
    quantity,
    set_option,
    strays,
    texts_of,
)
from simulator.cli.progress import StatusLine
from simulator.formats.drawing import check_picture
from simulator.formats.study import calibration_named
from simulator.formats.study.loading import cluster_with, model_of
from simulator.formats.study.provenance import model_notes
from simulator.formats.study.tables import counts_read
from simulator.formats.writers.front_plot import Point, write_front_plot
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.parts import MAX_NODES
from simulator.spec.prices import Prices
from simulator.spec.software.stack import Stack
from simulator.studies.search import (
    OBJECTIVES,
    Dask,
    Engine,
    Front,
    Interrupted,
    Journal,
    Objective,
    Processes,
    Progress,
    SearchStudy,
    Serial,
    Space,
    front,
    render,
    render_front,
    search_stacks,
    usual_stacks,
)
from simulator.studies.search.export import check_export, export
from simulator.studies.search.space import fix_faults
from simulator.studies.search.text import WIDTH

_HELP = """Find the best plan of a model on a cluster for one global batch.

Every legal plan is considered: degrees, ZeRO stage and implementation, schedule and virtual stages, micro-batches,
recomputation, sequence parallelism. What cannot fit or cannot beat the table goes by bounds that are proven; the rest is
simulated. --fix holds a field of the plan at one value or at several: --fix tp=8 --fix recompute=none,full.

Without --stack, the best plan of each usual framework is found (FSDP2 eager and compiled, Megatron, DeepSpeed). The table has
the best plan of each layout, those first that surely fit; --all has every good plan.

With --journal every finished candidate is kept: the same command goes on where it was interrupted.

--front searches each number of nodes for its quickest plan and sets time against cost.

Exit codes: 0 a plan fits, 2 usage, 3 bad input or nothing legal, 4 nothing fits, 130 interrupted or ended by SIGTERM (what is known is shown)."""


@click.command("search", help=_HELP)
@click.option("--model", required=True, metavar="NAME|FILE", help="A preset, a Hugging Face config.json or a .toml.")
@click.option("--like", metavar="FAMILY", help="Read --model's config.json as of that family (llama, mixtral, ...).")
@image_options
@cluster_option(required=True)
@set_option("Any leaf of cluster or device. May be repeated.")
@click.option("--nodes", metavar="N[,N...]", help="Numbers of nodes. [the file's; with --max-gpus: doubling up to it]")
@click.option("--global-batch", type=click.IntRange(1, 2**31), required=True, help="Sequences a step.")
@click.option("--seq-len", type=click.IntRange(1, 2**31), required=True, help="Tokens a sequence.")
@click.option("--max-gpus", type=click.IntRange(min=1), help="No plan on more devices.")
@click.option("--fix", "fixes", multiple=True, metavar="FIELD=V[,V...]", help="Values that a field of the plan may take.")  # fmt: skip
@click.option("--stack", metavar="NAME|FILE[,...]", help="Software stacks; each decides which plans are tried. [the usual four]")  # fmt: skip
@click.option("--calibration", metavar="NAME|FILE", help="A calibration; `ideal` or `datasheet`. [the device's own]")
@click.option("--rank", "objective", type=click.Choice(OBJECTIVES), default="step", show_default=True, help="By what.")
@click.option("--top", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Plans in the table.")
@click.option("--all", "every", is_flag=True, help="Every good plan, not the best of each layout; proven to the last row.")  # fmt: skip
@click.option("--fits-only", is_flag=True, help="Only plans whose memory surely fits: no tight ones.")
@click.option("--journal", type=FILE, metavar="FILE", help="Keep, and resume.")
@click.option("--export", "exported", type=FILE, metavar="FILE.csv|.json|.parquet")
@click.option("--launch-kit", "kit", type=click.Path(path_type=Path), metavar="DIR", help="Of the best plan, placed.")
@click.option("--hosts", metavar="HOSTLIST", help="Of the launch kit: the nodes' names.")
@click.option("--topology", metavar="SOURCE", help="Of the launch kit: one node, as for `shardwise topo`.")
@click.option("--front", "sizes", is_flag=True, help="The quickest plan of each number of nodes: time against cost.")
@price_options
@click.option("--run-tokens", metavar="N", help="Of --front: tokens of a run, as 15T: its days and cost.")
@click.option("--days", type=FiniteRange(min=0, min_open=True), help="Of --front: how many GPUs end it in time.")
@click.option("--plot", type=FILE, metavar="FILE.png|.svg", help="Of --front.")
@click.option("--engine", type=click.Choice(["processes", "dask"]), default="processes", show_default=True)
@click.option("--scheduler", metavar="HOST:PORT", help="Of dask.")
@click.option("--jobs", type=click.IntRange(1, 1024), help="Processes. [the machine's cores]")
@answer_options
def command(*, journal: Path | None, exported: Path | None, **options: Any) -> int:  # noqa: ANN401  one type an option
    """Search, print, export."""
    kit = _kit(options)
    study = _study(options)
    if options["sizes"]:
        return run_front(study, options | {"exported": exported}, journal)
    InputError.raise_for(strays(options, ("prices", "price_kind", "run_tokens", "days", "plot"), "--front"))
    if exported is not None:
        check_export(exported)
    interrupted = False
    with (
        Journal(journal, study.identity) if journal is not None else nullcontext() as store,
        _engine(study, options) as engine,
    ):
        try:
            report = search_stacks(study, engine, store, _ProgressLine())
        except Interrupted as stop:
            if stop.report is None:
                return ExitCode.INTERRUPTED
            report, interrupted = stop.report, True
    print_answer("search", report.as_json, lambda: render(report), width=WIDTH)
    if exported is not None:
        export(report, exported)
        print_status(f"written to {exported}")
    if kit is not None and report.rows and not interrupted:
        from simulator.cli.winner import write_winner

        write_winner(report, kit, options)
    if interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.OK if report.rows else ExitCode.DOES_NOT_FIT


def _kit(options: dict[str, Any]) -> Path | None:
    """The folder of a launch kit, free to be written."""
    kit: Path | None = options.pop("kit")
    if (options["hosts"] or options["topology"]) and kit is None:
        raise click.UsageError("--hosts and --topology are the launch kit's: --launch-kit DIR")
    if options["sizes"] and kit is not None:
        raise click.UsageError("--front has several best plans: a launch kit is of one")
    if kit is not None:
        from simulator.cli.launch_kit import check_folder

        check_folder(kit)
    return kit


def _engine(study: SearchStudy, options: dict[str, Any]) -> Engine:
    if options["engine"] == "dask":
        if not options["scheduler"]:
            raise InputError.at("--scheduler", "is missing", "--scheduler HOST:PORT")
        _warn_of_open(options["scheduler"])
        return Dask(study, options["scheduler"])
    if options["scheduler"]:
        raise InputError.at("--scheduler", "is only for --engine dask", "--engine dask")
    jobs = options["jobs"] or cores()
    return Processes(study, jobs) if jobs > 1 else Serial(study)


def _warn_of_open(scheduler: str) -> None:
    """Say what an address beyond this machine without TLS allows."""
    scheme, _, place = scheduler.rpartition("://")
    host = place.rpartition(":")[0].strip("[]")
    if scheme in ("", "tcp") and host not in ("localhost", "::1") and not host.startswith("127."):
        problem = "is neither encrypted nor closed to others: whoever reaches it can run code on its workers"
        print_status(f"shardwise: --scheduler {scheduler} {problem}; tls:// with certificates is (docs/security.md)")


def _study(options: dict[str, Any]) -> SearchStudy:
    """The study of the command line. Raises InputError with every fault."""
    faults: list[Fault] = []
    model = cluster = calibration = None
    fixed: dict[str, tuple[object, ...]] = {}
    with Collected(faults):
        model = model_of(counts_read(texts_of(options, "model", "like", "images", "image_size")), ())
        assert model is not None
        for note in model_notes(model):
            print_status(f"shardwise: {note}")
    with Collected(faults):
        cluster = cluster_with(options["cluster"], options["settings"])
        calibration = calibration_named(options["calibration"], cluster)
    for text in options["fixes"]:
        name, values, wrong = fixed_by(text, partial(fix_faults, others="--global-batch and --seq-len"))
        faults += wrong
        if name in fixed:
            remedy = f"one --fix {name} with all its values, separated by commas"
            faults.append(Fault(f"--fix {name}", "is given twice", remedy))
        fixed[name] = values
    faults += _choose_stacks(fixed, options["stack"])
    if faults or model is None or cluster is None:
        raise InputError(faults)
    objective: Objective = options["objective"]
    space = Space(
        model=model,
        clusters=_clusters(cluster, options["nodes"], options["max_gpus"]),
        global_batch=options["global_batch"],
        seq_len=options["seq_len"],
        fixed=fixed,
        max_devices=options["max_gpus"],
    )
    return SearchStudy(
        space=space,
        calibration=calibration if isinstance(calibration, Calibration) else None,
        objective=objective,
        top=options["top"],
        fits_only=options["fits_only"],
        layouts=not options["every"],
    )


def _choose_stacks(fixed: dict[str, tuple[object, ...]], text: str | None) -> list[Fault]:
    """Fix the software stacks that are named, each once, or the usual ones; what is wrong with them."""
    if text is None and "stack" not in fixed:
        fixed["stack"] = usual_stacks(fixed)
        return []
    if text is not None and "stack" in fixed:
        return [Fault("--stack", "contradicts --fix stack=...", "one of the two")]
    if text is not None:
        fixed["stack"] = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not fixed["stack"]:
        remedy = "a stack, several with commas, or no --stack for the usual four"
        return [Fault("--stack", "names none", remedy)] if text is not None else []
    faults: list[Fault] = []
    for name in fixed["stack"]:
        with Collected(faults):
            Stack.load(str(name))
    return faults


def _clusters(cluster: Cluster, nodes: str | None, most: int | None) -> tuple[Cluster, ...]:
    """The cluster at each requested number of nodes."""
    if nodes is None and most is None:
        return (cluster,)
    if nodes is None:
        limit = max(1, (most or 1) // cluster.gpus_per_node)
        counts = [2**power for power in range(limit.bit_length()) if 2**power <= limit]
    else:
        parts = nodes.split(",")
        if not all(part.strip().isdecimal() and len(part) < 10 and 0 < int(part) <= MAX_NODES for part in parts):
            raise InputError.at("--nodes", f"{nodes!r}", f"numbers of nodes up to {MAX_NODES}, as 8 or 8,16,32")
        counts = sorted({int(part) for part in parts})
    return tuple(cluster.with_nodes(count) for count in counts)


_FIRST: Final = ("listing", "scouting")  # what a search begins with, before it is known how much there is


class _ProgressLine:
    """Progress, elapsed time and what is left of the survey and of the budget; no rate, as candidates differ a hundredfold in cost."""

    def __init__(self) -> None:
        self._line, self._since = StatusLine(), time.monotonic()
        self._last_s, self._phase = self._since, ""
        self._took_s = dict[str, float]()  # by phase, of this search of several
        self._done = dict[str, float]()  # of each of them, where that is known

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.phase in _FIRST and self._phase not in _FIRST:
            self._took_s, self._done = {}, {}
        self._took_s[progress.phase] = self._took_s.get(progress.phase, 0.0) + now - self._last_s
        self._last_s, self._phase = now, progress.phase
        done = progress.done / progress.total if progress.total else progress.spent
        if progress.phase != "listing":  # what it took is no part of what follows
            self._done.pop("listing", None)
        if done and progress.phase != "scouting":
            self._done[progress.phase] = done
        stack = f"{progress.stack}: " if progress.stack else ""
        of_all = f" of {progress.total:,}" if progress.total is not None else ""
        parts = f"{of_all} {'plans' if progress.phase == 'simulation' else 'branches'}"
        best = f", best {progress.best:.6g}" if progress.best is not None else ""
        took = format_seconds(now - self._since)
        self._line.show(f"{stack}{progress.phase} of {progress.done:,}{parts}{best}, {took}{self._left()}")

    def _left(self) -> str:
        """What the survey and the budget take yet, if they go on as they did; a search may end before them."""
        left_s = sum(self._took_s[phase] * (1 / done - 1) for phase, done in self._done.items())
        return f", some {left_s:,.0f} s{' of it' * (self._phase == 'listing')} left" if self._done else ""


# `shardwise search --front`: the quickest plan of each number of nodes, time against cost.
def run_front(study: SearchStudy, options: dict[str, Any], journal: Path | None) -> int:
    """Search every size, print, draw."""
    prices, tokens = _judged(options)
    engine_of = partial(_engine, options=options)
    try:
        found = front(study, engine_of, journal, prices=prices, run_tokens=tokens, on_progress=_ProgressLine())
    except Interrupted:
        return ExitCode.INTERRUPTED
    days, plot = options["days"], options["plot"]
    print_answer(
        "front", lambda: found.as_json() | _enough(found, days), lambda: render_front(found, days), width=WIDTH
    )
    if plot is not None:
        write_front_plot(plot, _points(found), "seconds a step", f"{found.currency} a billion tokens")
        print_status(f"written to {plot}")
    return ExitCode.OK if any(row.best is not None for row in found.rows) else ExitCode.DOES_NOT_FIT


def _enough(found: Front, days: float | None) -> dict[str, int | float | None]:
    """The smallest sizes that finish the run in time, as JSON."""
    if days is None:
        return {}
    size, sure = found.enough(days)
    return {"days": days, "enough_nodes": size.nodes if size else None, "surely_nodes": sure.nodes if sure else None}


def _judged(options: dict[str, Any]) -> tuple[Prices | None, int | None]:
    """Prices and the run's tokens. Raises InputError with every fault, before anything is searched."""
    faults: list[Fault] = []
    prices = tokens = None
    with Collected(faults):
        prices = loaded_prices(options)
    with Collected(faults):
        tokens = None if options["run_tokens"] is None else quantity("--run-tokens", parse_count, options["run_tokens"])
    if tokens is not None and tokens < 1:
        faults.append(Fault(place="--run-tokens", problem="a run has at least one token", remedy="--run-tokens 15T"))
    if options["days"] is not None and options["run_tokens"] is None:
        faults.append(Fault(place="--days", problem="of what run?", remedy="--run-tokens 15T"))
    if options["plot"] is not None:
        with Collected(faults):
            check_picture(options["plot"], "--plot")
    if options.get("exported") is not None:
        problem, remedy = "writes one table of plans, and --front makes several", "--json, or leave out --front"
        faults.append(Fault(place="--export", problem=problem, remedy=remedy))
    InputError.raise_for(faults)
    return prices, tokens


def _points(found: Front) -> list[Point]:
    points = []
    for row in found.rows:
        if row.best is None or row.billion_tokens is None:
            continue
        label = counted(row.best.outcome.num_devices, "GPU")
        time_s, low_s, high_s = row.best.outcome.interval_s
        points.append(
            Point(label=label, time=time_s, low=low_s, high=high_s, money=row.billion_tokens, best=row.on_front)
        )
    return points
