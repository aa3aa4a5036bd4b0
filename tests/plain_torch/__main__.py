"""`python -m tests.plain_torch [NAME ...] [--device cpu|cuda]`: a table of each plan's bytes, fake and plain, and an exit status.

0: every moment of every plan is equal to the byte. 1: a plan differs, or one of the two did not end. Two processes at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tests.plain_torch.plans import PLANS, task
from validate.compare.borders import borders

HERE: Final = Path(__file__).resolve().parents[2]
MOMENTS: Final = ("start_bytes", "after_forward_bytes", "after_backward_bytes", "peak_bytes")
HEADS: Final = ("plan", "device", "peak, fake", "peak, plain", "largest difference", "where", "peak, predicted - plain")
DEADLINE_S: Final = 1800


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.plain_torch", description=__doc__)
    parser.add_argument("name", nargs="*", choices=[[], *PLANS], help="plans; all, if none is named")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this one's bytes; cuda needs a C++ compiler")
    asked = parser.parse_args(argv)
    names = asked.name or list(PLANS)
    print(f"| {' | '.join(HEADS)} |\n|{' --- |' * len(HEADS)}", flush=True)
    differ = count = 0
    for device in [asked.device] if asked.device else ["cpu", "cuda"]:
        for name, one, other in both(names, device):
            cells, equal = row(one, other)
            cells.append(beyond(name, device, other))
            print(f"| {name} | {device} | {' | '.join(cells)} |", flush=True)
            count, differ = count + 1, differ + (not equal)
    print(f"\n{count - differ} of {count} plans are equal to the byte")
    return int(differ > 0)


def both(
    names: Sequence[str], device: str, start: Callable[[str, list[str], dict[str, str]], Any] | None = None
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each plan's answers, fake and plain. start: another way to start a process, of "fake" or "plain", command, environment."""
    own = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        outs = {way: Path(folder) / way for way in ("fake", "plain")}
        started = [(start or _started)(way, _command(way, device, out, names), own) for way, out in outs.items()]
        for process in started:
            _ended(process)
        answers = {way: _answers(out) for way, out in outs.items()}
    silent = {"error": "no answer"}
    for name in names:
        yield name, answers["fake"].get(name, silent), answers["plain"].get(name, silent)


def _command(way: str, device: str, out: Path, names: Sequence[str]) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "tests.plain_torch.rank", way, device, str(out), *names]


def _started(_: str, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment, cwd=HERE)


def _ended(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(DEADLINE_S)
    finally:
        process.kill()


def _answers(out: Path) -> dict[str, dict[str, Any]]:
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {one["name"]: one for one in map(json.loads, lines)}


def row(one: dict[str, Any], other: dict[str, Any]) -> tuple[list[str], bool]:
    """Cells of a plan, and whether both are equal at every moment."""
    if wrong := [answer["error"] for answer in (one, other) if "error" in answer]:
        return ["", "", "", "; ".join(wrong).replace("|", "/")], False
    fake, plain = (flat(answer["memory"]) for answer in (one, other))
    worst = max(fake, key=lambda name: abs(fake[name] - plain[name]))
    difference = fake[worst] - plain[worst]
    sizes = [f"{answer['peak_bytes']:,}" for answer in (fake, plain)]
    return [*sizes, f"{difference:+,}" if difference else "0", worst if difference else ""], not difference


def beyond(name: str, device: str, plain: dict[str, Any]) -> str:
    """What `predict` has at the peak beyond plain torch; it decides nothing here."""
    asked = task(name, device)
    if "memory" not in plain:
        return ""
    granularity = 512 if device == "cuda" else 1
    predicted = borders(asked.model, asked.plan, asked.stack, granularity_bytes=granularity)
    return f"{predicted.peak_bytes - plain['memory']['peak_bytes']:+,}"


def flat(memory: dict[str, Any]) -> dict[str, int]:
    """Bytes at the borders of phases, at the peak and at each phase's."""
    return {name: memory[name] for name in MOMENTS} | {
        f"peak of {name}": size for name, size in memory["peak_by_phase_bytes"].items()
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
