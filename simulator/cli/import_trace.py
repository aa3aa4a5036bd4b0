"""`shardwise import`: a profiler's trace of a real step, in our words, and beside a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from simulator.base.exit_codes import ExitCode
from simulator.base.units import format_bytes, format_seconds
from simulator.cli.options import FILE, print_status, print_text, write_json
from simulator.formats.readers import chakra
from simulator.formats.readers.kineto import KinetoTrace, read_kineto, summary

_HELP = """Read a Kineto or Chrome trace (torch.profiler's export_chrome_trace; .json or .json.gz, of any size), an export of
Nsight Systems (`nsys export --type sqlite`), or a Chakra execution trace (.et).

One profiled step of it is broken down as a prediction is. With --study the same plan is predicted and put beside it;
-o adds the step to a file that `shardwise validate compare` reads. With --program a capture of the same program is put beside
it, operator by operator. --snapshot brings the peaks of a CUDA memory
snapshot of the same run."""


@click.command("import", help=_HELP)
@click.argument("trace", type=click.Path(path_type=Path), metavar="TRACE")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="ProfilerStep#N. [that of median duration]")
@click.option("--study", type=click.Path(path_type=Path), metavar="STUDY.toml", help="What was run, as for predict.")
@click.option("--snapshot", type=click.Path(path_type=Path), metavar="FILE", help="Its CUDA memory snapshot.")
@click.option("--program", type=FILE, metavar="CAPTURE", help="A capture of the same program: operator by operator.")
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="RUNS.jsonl", help="Add the run; needs --study.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON (docs/reference/replay.md).")
def command(
    trace: Path,
    *,
    step: int | None,
    study: Path | None,
    snapshot: Path | None,
    program: Path | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Read, print, compare."""
    if program is not None:
        if study is not None:
            raise click.UsageError("--study and --program are two ways to say what was run")
        return _beside(trace, step, program, as_json=as_json)
    if study is None and (out is not None or snapshot is not None):
        raise click.UsageError("-o and --snapshot need --study: what was run")
    read = _read(trace, step)
    found = summary(read)
    compared = None
    if study is not None:  # measured runs are the business of validate
        from validate.imported import compare

        compared = compare(read, study, snapshot, out)
    if as_json:
        answer = {"schema_version": 1, **found, "comparison": compared}
        write_json(answer)
    else:
        print_text(_text(found))
        if compared is not None:
            from validate.text import comparison_text

            print_text("\n" + comparison_text(compared))
    return ExitCode.OK


def _read(trace: Path, step: int | None) -> KinetoTrace:
    """A profiler's trace, or an execution trace as one."""
    if not trace.name.endswith(chakra.SUFFIX):
        return read_kineto(trace, step, lambda characters: print_status(f"read {format_bytes(characters)}"))
    from simulator.formats.readers.recording import read_recording
    from simulator.formats.readers.recording_parts import as_trace

    return as_trace(read_recording(trace, step))


def _beside(trace: Path, step: int | None, program: Path, *, as_json: bool) -> int:
    """The trace beside a capture, priced on the device that it was captured for."""
    from simulator.formats.readers.capture import read_capture
    from simulator.spec.cluster.device import Device
    from validate import lined_up_text
    from validate.lined_up import lined_up
    from validate.recorded_operators import read_operators

    capture = read_capture(program)
    found = lined_up(capture, read_operators(trace, step), Device.load(capture.device))
    if as_json:
        write_json(lined_up_text.as_json(found))
    else:
        print_text(lined_up_text.text_of(found, program.name, trace.name))
    return ExitCode.OK


def _text(found: Mapping[str, Any]) -> str:
    about = ", ".join(f"{key} {value}" for key, value in found["about"].items() if key != "devices")
    step = f"step {found['step']}, one of {len(found['step_times_s'])}"
    which = "all that was recorded" if found["step"] is None else step
    lines = [f"{found['name']}: {which}, {format_seconds(found['step_s'])}" + (f" ({about})" if about else "")]
    parts = sorted(found["breakdown_s"].items(), key=lambda item: -item[1])
    lines += [f"  {name:<28}{format_seconds(s):>12}{s / found['step_s']:>8.1%}" for name, s in parts]
    for kind, row in found["communication"].items():
        times = f"{format_seconds(row['exposed_s'])} exposed, {format_seconds(row['hidden_s'])} hidden"
        size = f", {format_bytes(row['size_bytes'])} in all" if row["size_bytes"] else ""
        groups = f", groups {', '.join(row['groups'])}" if row["groups"] else ""
        lines.append(f"  {kind}: {row['count']} times, {times}{size}{groups}")
    if found["memory"] is not None:
        peaks = found["memory"]
        allocated, reserved = (format_bytes(peaks[f"peak_{name}_bytes"]) for name in ("allocated", "reserved"))
        lines.append(f"  memory: peak allocated {allocated}, reserved {reserved}")
    return "\n".join([*lines, *(f"  note: {note}" for note in found["notes"])])
