"""`shardwise replay`: a recorded memory trace through our allocator, exactly or under other settings and policies."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.base.errors import Collected, Fault, InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from simulator.cli.finite import FiniteRange
from simulator.cli.options import answer_options, print_answer, quantity
from simulator.formats.readers.snapshot import read_snapshot
from simulator.memory.allocator import AllocatorSettings
from simulator.memory.allocator.blocks import LARGE_SEGMENT_BYTES, MIB
from simulator.memory.policies import BLOCK_BYTES, POLICIES, PoolInputs
from simulator.memory.pools import NATIVE, Pools
from simulator.spec.calibration import Calibration
from simulator.studies.replay import (
    Demand,
    DriverCosts,
    ReplayReport,
    Score,
    Sequence,
    compare,
    demand,
    of_history,
    of_recording,
    replay,
    varied,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

_HELP = """Play a CUDA memory snapshot through shardwise's allocator and compare every address, segment and counter.

SNAPSHOT is what torch.cuda.memory._dump_snapshot() wrote (a pickle; none of its globals is ever loaded), or the same
as JSON; gzipped or not. With any of the options under "what if" the same requests are played under other settings or
policies instead; --plan takes the requests of a predicted step.

Exit codes: 0 all equal (what if: it fits), 1 something differs, 2 usage, 3 bad input, 4 out of memory under every policy
asked for."""

DIFFERS = 1
_WIDTH = 130
_STEPS = 8  # of sizes that vary

_SCHEMA = 1


@click.command("replay", help=_HELP)
@click.argument("snapshot", required=False, type=click.Path(path_type=Path), metavar="SNAPSHOT")
@click.option("--plan", "study", type=click.Path(path_type=Path), metavar="STUDY.toml", help="A study as for predict.")
@click.option("--device", type=click.IntRange(min=0), help="Whose events. [the first device with any]")
@click.option("--policy", "policies", multiple=True, type=click.Choice(list(POLICIES)), help="What if; repeatable.")
@click.option("--compare-policies", is_flag=True, help="What if: every policy.")
@click.option("--expandable-segments", is_flag=True, help="As if PYTORCH_CUDA_ALLOC_CONF had them on.")
@click.option("--max-split-size", metavar="SIZE", help="What if: blocks from here on are not split (20 MiB or more).")
@click.option("--roundup-power2-divisions", type=click.IntRange(1, 2**10), metavar="N", help="What if.")
@click.option("--garbage-collection-threshold", type=FiniteRange(0, 1, max_open=True), help="What if.")
@click.option("--capacity", metavar="SIZE", help="What if: all that the driver can give.")
@click.option("--block-size", metavar="SIZE", help="Of the policy `fixed`, a multiple of 2 MiB. [2MiB]")
@click.option("--vary-sizes", type=FiniteRange(0, 1), metavar="SHARE", help="What if sizes change every step.")
@click.option("--alloc-s", metavar="TIME", help="What if an allocator of one's own takes so long for an allocation.")
@click.option("--free-s", metavar="TIME", help="The same of a free.")
@click.option("--calibration", metavar="NAME|FILE", help="Whose costs of the driver's calls.")
@partial(answer_options, json_help="Write JSON (docs/reference/replay.md).")
def command(snapshot: Path | None, *, study: Path | None, **options: Any) -> int:  # noqa: ANN401
    """Replay and print; the exit code gives the outcome."""
    if (snapshot is None) == (study is None):
        raise click.UsageError("give either SNAPSHOT or --plan STUDY.toml")
    calibration = Calibration.load(options["calibration"]) if options["calibration"] else None
    what_if = {name: value for name, value in options.items() if name not in ("device", "calibration") and value}
    if snapshot is not None and not what_if:
        return _exact(snapshot, options["device"])
    return _what_if(snapshot, study, calibration, options)


def _exact(snapshot: Path, device: int | None) -> int:
    report = replay(read_snapshot(snapshot, device))
    data = {"schema_version": _SCHEMA, "exact": report.is_exact, **asdict(report)}
    print_answer("replay", lambda: data, lambda: _exact_text(report))
    return ExitCode.OK if report.is_exact else DIFFERS


def _what_if(
    snapshot: Path | None,
    study: Path | None,
    calibration: Calibration | None,
    options: dict[str, Any],
) -> int:
    needs, policies_of_input = _needs(options), [NATIVE]
    if snapshot is not None:
        recording = read_snapshot(snapshot, options["device"])
        sequence = of_recording(recording)
        needs = replace(needs, settings=_merged(recording.settings, options))
    else:
        sequence, own, pools = _predicted(study)
        calibration = calibration or own
        needs = replace(needs, settings=_merged(pools.settings, options))
        if options["block_size"] is None:
            needs = replace(needs, block_bytes=pools.block_bytes)
        policies_of_input = [pools.name]
    if options["vary_sizes"]:
        changed = varied(sequence, options["vary_sizes"], _STEPS)
        if changed is None:
            raise InputError.at(
                "--vary-sizes",
                "the events do not end with the blocks they began with, so they cannot be repeated",
                "record exactly one step",
            )
        sequence = changed
    policies = (
        list(POLICIES) if options["compare_policies"] else list(dict.fromkeys(options["policies"])) or policies_of_input
    )
    costs, demanded = DriverCosts.of(calibration), demand(sequence)
    scores = compare(sequence, policies, needs, costs)
    own_s = _own_s(options, demanded)
    moves = _moves(study, scores)
    sequence = replace(sequence, notes=(*sequence.notes, *_notes_of(own_s, moves)))
    data = {
        "schema_version": _SCHEMA,
        "name": sequence.name,
        "settings": asdict(needs.settings),
        "capacity_bytes": needs.capacity_bytes,
        "demand": asdict(demanded),
        **({"own_allocator_s": own_s} if own_s else {}),
        **({"moves": moves} if moves is not None else {}),
        "policies": [_score_data(score) for score in scores],
        "costs": costs.source,
        "notes": list(sequence.notes),
    }
    text = partial(_policies_text, sequence, demanded, scores, costs.source)
    print_answer("policies", lambda: data, text, width=_WIDTH)
    return min((score.fit for score in scores), key=lambda fit: fit.rank).exit_code


def _exact_text(report: ReplayReport) -> RenderableType:
    from simulator.formats.writers.replay_text import exact_text

    return exact_text(report)


def _policies_text(*answer: Any) -> RenderableType:  # noqa: ANN401  of `policies_text`
    from simulator.formats.writers.replay_text import policies_text

    return policies_text(*answer)


def _score_data(score: Score) -> dict[str, Any]:
    data = asdict(score)
    return data if score.moved_bytes else {name: value for name, value in data.items() if name != "moved_bytes"}


def _own_s(options: dict[str, Any], demanded: Demand) -> float:
    """Seconds that a user's allocator takes for a step's requests. Raises InputError for invalid times."""
    faults, found = list[Fault](), 0.0
    for name, count in (("alloc_s", demanded.num_allocations), ("free_s", demanded.num_frees)):
        with Collected(faults):
            flag = f"--{name.replace('_', '-')}"
            found += count * (quantity(flag, parse_seconds, options[name]) if options[name] else 0.0)
    InputError.raise_for(faults)
    return found


def _moves(study: Path | None, scores: Rows[Score]) -> dict[str, Any] | None:
    """Transfers besides the program's own and the share of each link that they use during the predicted step; None: no transfers.

    Inside the GPU every byte is read and written; through a peer or the host it crosses the link each way once.
    """
    moved = max((score.moved_bytes for score in scores), default=0)
    if not any(score.policy == "defrag" for score in scores):
        return None
    found: dict[str, Any] = {"bytes": moved}
    if study is not None:
        from simulator.formats.study import read_study
        from simulator.predict import predict

        loaded = read_study(study, {}, {}, ())
        step_s = float(predict(*loaded.parts).step_s)
        cluster, host = loaded.cluster, loaded.cluster.host_link
        rates = {"hbm": cluster.device.memory_bytes_per_s / 2, cluster.intra.kind: cluster.intra.bytes_per_s}
        rates |= {host.kind: host.bytes_per_s} if host is not None else {}
        found |= {"step_s": step_s, "shares": {name: moved / float(rate) / step_s for name, rate in rates.items()}}
    return found


def _notes_of(own_s: float, moves: dict[str, Any] | None) -> list[str]:
    notes = [f"an allocator of one's own: {format_seconds(own_s)} a step beside"] if own_s else []
    if moves is not None:
        shares = ", ".join(f"{share:.1%} of {name}" for name, share in moves.get("shares", {}).items())
        over = f" over a step of {format_seconds(moves['step_s'])}: {shares}" if shares else ""
        notes.append(f"defrag moves {format_bytes(moves['bytes'])} a step{over}")
    return notes


def _predicted(study: Path | None) -> tuple[Sequence, Calibration, Pools]:
    """The requests of a study's first and steady step, the calibration it is predicted with, and the pool it asks for."""
    from simulator.cli.options import print_notes
    from simulator.formats.study import read_study
    from simulator.memory import device_history
    from simulator.spec.software.stack import Stack

    loaded = print_notes(read_study(study, {}, {}, ()))
    stack = loaded.stack or Stack.of(loaded.plan)
    device = loaded.cluster.device
    history = device_history(loaded.model, loaded.plan, stack, device)
    calibration = loaded.calibration or Calibration.for_device(device)
    return of_history(history, str(study)), calibration, Pools.of(loaded.plan)


def _needs(options: dict[str, Any]) -> PoolInputs:
    """Raises InputError with every faulty size."""
    faults: list[Fault] = []
    sizes: dict[str, int] = {}
    for name, least, unit in (
        ("max_split_size", LARGE_SEGMENT_BYTES, 1),
        ("capacity", 2 * MIB, 1),
        ("block_size", BLOCK_BYTES, BLOCK_BYTES),
    ):
        if options[name] is not None:
            with Collected(faults):
                sizes[name] = _size(f"--{name.replace('_', '-')}", options[name], least, unit)
    InputError.raise_for(faults)
    options["max_split_size"] = sizes.get("max_split_size")
    settings, block = _merged(AllocatorSettings(), options), sizes.get("block_size", BLOCK_BYTES)
    return PoolInputs(settings=settings, capacity_bytes=sizes.get("capacity"), block_bytes=block)


def _size(flag: str, text: str, least: int, unit: int) -> int:
    value = quantity(flag, parse_bytes, text)
    if value < least or value % unit:
        remedy = f"{least // MIB} MiB or more" + (f", in steps of {unit // MIB} MiB" if unit > 1 else "")
        raise InputError.at(flag, f"is {text}", remedy)
    return value


def _merged(settings: AllocatorSettings, options: dict[str, Any]) -> AllocatorSettings:
    """The recording's allocator settings, overridden by the options."""
    changes: dict[str, Any] = {}
    if options["expandable_segments"]:
        changes["expandable_segments"] = True
    if options["max_split_size"] is not None:
        changes["max_split_size_bytes"] = options["max_split_size"]
    if options["roundup_power2_divisions"] is not None:
        changes["roundup_power2_divisions"] = (options["roundup_power2_divisions"],) * 16
    if options["garbage_collection_threshold"] is not None:
        changes["garbage_collection_threshold"] = options["garbage_collection_threshold"]
    return replace(settings, **changes)
