"""Runs what decides the claims, and writes what became of them: `python -m experiments.claims`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from pathlib import Path

from simulator.base.exit_codes import ExitCode
from simulator.base.files import write_whole

from .claim import HERE, Claim, load_all
from .commands import Answers, asked, run_all, values
from .page import page, pictures
from .verdicts import Settled, settle

ANSWERS = HERE / "answers.json"
DOCS = HERE.parents[1] / "docs"


def main() -> int:
    """Ask, settle, write; the page is written if all is settled. The exit code is returned."""
    parser = argparse.ArgumentParser(prog="python -m experiments.claims", description=__doc__)
    parser.add_argument("--only", metavar="ID", action="append", help="ask only for this claim; repeatable")
    parser.add_argument("--settle", action="store_true", help="ask nothing: settle by the answers that are kept")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes [2]")
    options = parser.parse_args()
    try:
        claims = load_all()
        if unknown := sorted(set(options.only or ()) - {claim.id for claim in claims}):
            parser.error(f"no such claim: {', '.join(unknown)}; there are {', '.join(claim.id for claim in claims)}")
        answers = _answers(claims, chosen=options.only, jobs=max(1, options.jobs), ask=not options.settle)
        _put(ANSWERS, json.dumps(answers, indent=1) + "\n")
        _write([settle(claim, values(claim, answers)) for claim in claims])
    except ValueError as exc:
        print(f"claims: {exc}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        print("claims: interrupted, nothing was written", file=sys.stderr)
        for child in multiprocessing.active_children():  # a command may run on for a while, and nobody wants its answer
            child.terminate()
        return ExitCode.INTERRUPTED
    return 0


def _answers(claims: list[Claim], chosen: list[str] | None, jobs: int, *, ask: bool) -> Answers:
    """Those of all claims' commands: asked now, or kept where not all are asked."""
    wanted = asked(claims)
    own = asked([claim for claim in claims if not chosen or claim.id in chosen]) if ask else {}
    stored: Answers = json.loads(ANSWERS.read_text(encoding="utf-8")) if ANSWERS.exists() and own != wanted else {}
    known = stored | run_all({command: paths for command, paths in wanted.items() if command in own}, jobs)
    return {command: known[command] for command in wanted if command in known}


def _write(settled: list[Settled]) -> None:
    folder = DOCS / "claims"
    folder.mkdir(exist_ok=True)
    drawn = pictures(settled)
    for name, text in drawn.items():
        _put(folder / name, text)
    for path in sorted(folder.glob("*.svg")):
        if path.name not in drawn:
            path.unlink()
    _put(DOCS / "claims.md", page(settled))


def _put(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_whole(path, text)
        print(f"claims: wrote {path.relative_to(DOCS.parent)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
