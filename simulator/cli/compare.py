"""`shardwise compare`: plans, clusters or both side by side, and what limits each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from simulator.base.errors import Collected, Fault, InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.progress import MEMORY, PLAY
from simulator.base.units import parse_count
from simulator.cli.options import (
    FILE,
    OF_ALL_STUDIES,
    answer_options,
    loaded_prices,
    of_all_studies,
    placement_option,
    price_options,
    print_answer,
    print_notes,
    print_status,
    quantity,
    texts_of,
    tokens_option,
)
from simulator.cli.programs import is_program, subject_at
from simulator.cli.progress import told
from simulator.cli.watch import watch_option
from simulator.formats.drawing import check_picture
from simulator.formats.study import read_study
from simulator.formats.study.overrides import parse_overrides, patched
from simulator.formats.writers.front_plot import Point, write_front_plot
from simulator.spec.cluster import Cluster
from simulator.spec.prices import Prices
from simulator.studies.compare import Comparison, Subject, compare, render
from simulator.studies.compare.text import WIDTH

_NOUNS = ("model", "cluster", "nodes", "placement", "calibration")  # that a setting may name as a whole

_HELP = """Compare studies: STUDY.toml files or captured programs (.capture.gz, or a script to capture now), and variants of the
first made by --what-if.

Each --what-if is one more column: the first study with settings changed, as --set of predict takes them, separated by
commas: --what-if plan.micro_batch_size=2,plan.num_micro_batches=4 --what-if cluster.inter.nic_bytes_per_s=100Gb/s.
cluster=8xh200 or model=qwen3-32b is another one. x2 is twice what the leaf is; link.intra=nvlink5 or =off (no NVLink) and link.inter.bytes_per_s=800Gb/s are short for the
cluster's links; price.per_gpu_hour=1.5 is another price than that of --prices. --set changes all studies alike. Differences have intervals in which errors that both share cancel; ablations say what
the step would gain without a limit.

Exit codes: 0 compared, 2 usage, 3 bad input."""


@click.command("compare", help=_HELP)
@click.argument("studies", nargs=-1, type=click.Path(path_type=Path), metavar="[STUDY.toml|CAPTURE]...")
@click.option("--what-if", "variants", multiple=True, metavar="KEY=VALUE[,KEY=VALUE...]", help="A variant of the first.")  # fmt: skip
@of_all_studies
@tokens_option
@placement_option
@price_options
@click.option("--run-tokens", metavar="N", help="Tokens of a training run, as 15T.")
@click.option("--plot", type=FILE, metavar="FILE.png|.svg", help="Time against cost.")
@click.option("--no-ablations", is_flag=True, help="Do not ask what each limit costs.")
@click.option("--telemetry", is_flag=True, help="Also how busy each link, memory and processor is, beside one another.")
@answer_options
@watch_option
def command(
    studies: tuple[Path, ...],
    *,
    variants: tuple[str, ...],
    settings: tuple[str, ...],
    no_ablations: bool,
    **options: Any,  # noqa: ANN401  one type an option
) -> int:
    """Predict all, print them side by side."""
    run_tokens, plot, prices = options["run_tokens"], options["plot"], options["prices"]
    given = texts_of(options, *OF_ALL_STUDIES, "placement", "tokens_per_step")
    columns = columns_of(studies, variants, settings)
    if len(columns) < 2:
        raise InputError.at("compare", "there is nothing to compare with", "two studies, or --what-if KEY=VALUE")
    if run_tokens is not None and prices is None:
        raise InputError.at("--run-tokens", "costs need prices", "--prices PRICES.toml")
    faults: list[Fault] = []
    tokens = listed = None
    with Collected(faults):
        tokens = None if run_tokens is None else quantity("--run-tokens", parse_count, run_tokens)
    if plot is not None:
        with Collected(faults):
            check_picture(plot, "--plot")
            if prices is None:
                raise InputError.at("--plot", "costs need prices", "--prices PRICES.toml")
    with Collected(faults):
        listed = loaded_prices(options)
    subjects: list[Subject] = []
    for name, file, changes in columns:
        try:
            subjects.append(subject_of(name, file, given, changes, listed))
        except InputError as exc:
            placed = (_at_variant(fault, name) if name in variants else fault for fault in exc.faults)
            faults += [fault for fault in dict.fromkeys(placed) if fault not in faults]
    InputError.raise_for(faults)
    with told(f"{len(subjects)} plans", {MEMORY: len(subjects), PLAY: 10 * len(subjects)}):  # also of what limits each
        comparison = compare(subjects, ablate=not no_ablations, run_tokens=tokens, count=options["telemetry"])
    print_answer("compare", comparison.as_json, lambda: render(comparison), width=WIDTH)
    if plot is not None:
        _draw(plot, comparison)
    return ExitCode.OK


def _at_variant(fault: Fault, variant: str) -> Fault:
    """The fault of a column's own setting, placed at the option that gave it."""
    flag = fault.place.removeprefix("--set ")
    own = any(flag.startswith(setting.partition("=")[0].strip()) for setting in split_settings(variant))
    return replace(fault, place=f"--what-if {flag}") if own and flag != fault.place else fault


def _draw(plot: Path, comparison: Comparison) -> None:
    """Microseconds a token against money, each row at its cheapest price."""
    points = []
    for row, best in zip(comparison.rows, comparison.on_front, strict=True):
        p, money = row.prediction, min(cost.billion_tokens for cost in row.costs)
        time, low, high = (float(each) / p.tokens_per_step * 1e6 for each in (p.step_s, p.low_s, p.high_s))
        label = row.subject.name if p.fits else f"{row.subject.name} ({p.verdict})"
        points.append(Point(label=label, time=time, low=low, high=high, money=money, best=best))
    currency = comparison.rows[0].costs[0].currency
    write_front_plot(plot, points, "microseconds a token", f"{currency} a billion tokens")
    print_status(f"written to {plot}")


def name_of(file: Path | None) -> str:
    """The display name of a study."""
    return "the default" if file is None else file.stem.removesuffix(".capture")


def split_settings(variant: str) -> list[str]:
    """Settings of a variant, split at commas that are outside of brackets and followed by a key."""
    parts: list[str] = []
    for part in variant.split(","):
        inside = parts and (parts[-1].count("[") > parts[-1].count("]") or parts[-1].count("{") > parts[-1].count("}"))
        if parts and (inside or "=" not in part):
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def columns_of(
    studies: Sequence[Path], variants: Sequence[str], settings: tuple[str, ...]
) -> list[tuple[str, Path | None, tuple[str, ...]]]:
    """Name, file and settings of each study, and of each variant of the first one."""
    files: list[Path | None] = [*studies] if studies else [None]
    found = [(name_of(file), file, settings) for file in files]
    return found + [(variant, files[0], (*settings, *split_settings(variant))) for variant in variants]


def subject_of(
    name: str, file: Path | None, flags: dict[str, str], settings: tuple[str, ...], prices: Prices | None
) -> Subject:
    """A study or a captured program under flags and settings, with its prices. Raises InputError with every fault."""
    nouns = [setting for setting in settings if "=" in setting and setting.partition("=")[0].strip() in _NOUNS]
    named = {key.strip(): text.strip() for key, _, text in (setting.partition("=") for setting in nouns)}
    if len(named) < len(nouns):
        raise InputError.at(", ".join(nouns), "names one of the study's parts twice", "keep one")
    flags = flags | named
    settings = tuple(setting for setting in settings if setting not in nouns)
    priced = [setting for setting in settings if setting.strip().startswith("price.")]
    left = [setting for setting in settings if setting not in priced]
    if file is not None and is_program(file):
        places = {name: text for name, text in flags.items() if name != "tokens_per_step"}
        found = subject_at(name, file, places, left, prices, int(flags.get("tokens_per_step", 0)))
        return replace(found, prices=other_prices(prices, found.cluster, priced)) if priced else found
    described = {name: text for name, text in flags.items() if name != "tokens_per_step"}
    study = print_notes(read_study(file, described, {}, left))
    return Subject(
        name=name,
        model=study.model,
        plan=study.plan,
        cluster=study.cluster,
        calibration=study.calibration,
        stack=study.stack,
        servers=study.servers,
        prices=other_prices(prices, study.cluster, priced) if priced else prices,
    )


def other_prices(prices: Prices | None, cluster: Cluster, settings: list[str]) -> Prices:
    """The prices of a cluster with others put in: a key changes those of a kind that has it."""
    if prices is None:
        raise InputError.at(settings[0], "there are no prices to change", "--prices PRICES.toml")
    overrides, faults = parse_overrides(settings, ("price",))
    InputError.raise_for(faults)
    changed = {}
    for price in prices.of(cluster):
        meant = [one for one in overrides if getattr(price, one.path[0], 0) is not None]
        changed[price] = patched(price, meant, InputError)
    for one in overrides:
        if all(getattr(price, one.path[0], 0) is None for price in changed):
            problem = f"no price of {cluster.name} has {one.path[0]}: they are {', '.join(p.kind for p in changed)}"
            raise InputError.at(one.flag, problem)
    return prices.model_copy(update={"price": tuple(changed.get(price, price) for price in prices.price)})
