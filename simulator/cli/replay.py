"""`shardwise replay`: a recorded memory trace through our allocator, exactly or under other settings and policies."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from simulator.readers.snapshot import read_snapshot
from simulator.replay import ReplayReport, replay

_HELP = """Play a CUDA memory snapshot through shardwise's allocator and compare every address, segment and counter.

SNAPSHOT is what torch.cuda.memory._dump_snapshot() wrote (a pickle; none of its globals is ever loaded), or the same
as JSON; gzipped or not.

Exit codes: 0 all equal, 1 something differs, 2 usage, 3 bad input."""

DIFFERS = 1


@click.command("replay", help=_HELP)
@click.argument("snapshot", type=click.Path(path_type=Path), metavar="SNAPSHOT")
@click.option("--device", type=click.IntRange(min=0), help="Whose events. [the first device with any]")
@click.option("--json", "as_json", is_flag=True, help="Write JSON (docs/reference/replay.md).")
def command(snapshot: Path, *, device: int | None, as_json: bool) -> int:
    """Replay, print, and say by the exit code whether all is equal."""
    report = replay(read_snapshot(snapshot, device))
    if as_json:
        click.echo(json.dumps(exact_json(report), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        click.echo(exact_text(report))
    return 0 if report.is_exact else DIFFERS


def exact_json(report: ReplayReport) -> dict[str, Any]:
    """The report as plain data."""
    return {"schema_version": 1, "exact": report.is_exact, **asdict(report)}


def exact_text(report: ReplayReport) -> str:
    """The report for people."""
    lines = [f"{'EXACT' if report.is_exact else 'DIFFERS'}  {report.name}: {report.num_events:,} events"]
    for name in ("allocations", "taken", "returned", "segments", "blocks"):
        tally = getattr(report, name)
        extra = f", {tally.extra:,} of ours were not recorded" if tally.extra else ""
        lines.append(f"  {name:<16} {tally.matched:,} of {tally.total:,} the same{extra}")
    for name, (recorded, replayed) in report.counters.items():
        same = "the same" if recorded == replayed else f"ours {replayed:,}"
        lines.append(f"  {name:<16} {recorded:,} {same}")
    if report.first_mismatch is not None:
        first = report.first_mismatch
        lines.append(
            f"  first difference at event {first.index}, {first.event}: {first.recorded}; ours: {first.replayed}"
        )
    lines += [f"  note: {note}" for note in report.notes]
    return "\n".join(lines)
