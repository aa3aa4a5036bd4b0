"""Runs what decides the claims, and writes what became of them: `python -m experiments.claims [--only ID] [--jobs N]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from simulator.base.files import write_whole

from .claim import HERE, Claim, load_all
from .commands import Answers, asked, run_all, values
from .page import page, pictures
from .verdicts import settle

ANSWERS = HERE / "answers.json"
DOCS = HERE.parents[1] / "docs"


def main() -> int:
    """Ask, settle, write; nothing is written if anything failed. The exit code is returned."""
    parser = argparse.ArgumentParser(prog="python -m experiments.claims", description=__doc__)
    parser.add_argument("--only", metavar="ID", action="append", help="ask only for this claim; repeatable")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes [2]")
    options = parser.parse_args()
    try:
        claims = load_all()
        if unknown := sorted(set(options.only or ()) - {claim.id for claim in claims}):
            parser.error(f"no such claim: {', '.join(unknown)}; there are {', '.join(claim.id for claim in claims)}")
        chosen = asked([claim for claim in claims if not options.only or claim.id in options.only])
        wanted = {command: paths for command, paths in asked(claims).items() if command in chosen}
        found = run_all(wanted, max(1, options.jobs))
        return _write(claims, found, known=_known() if options.only else {})
    except ValueError as exc:
        print(f"claims: {exc}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("claims: interrupted, nothing was written", file=sys.stderr)
        return 130


def _known() -> Answers:
    found: Answers = json.loads(ANSWERS.read_text(encoding="utf-8")) if ANSWERS.exists() else {}
    return found


def _write(claims: list[Claim], found: Answers, known: Answers) -> int:
    answers = {command: (known | found)[command] for command in asked(claims) if command in known | found}
    settled = [settle(claim, values(claim, answers)) for claim in claims]
    folder = DOCS / "claims"
    folder.mkdir(exist_ok=True)
    drawn = pictures(settled)
    for name, text in drawn.items():
        _put(folder / name, text)
    for path in sorted(folder.glob("*.svg")):
        if path.name not in drawn:
            path.unlink()
    _put(ANSWERS, json.dumps(answers, indent=1) + "\n")
    _put(DOCS / "claims.md", page(settled))
    return 0


def _put(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_whole(path, text)
        print(f"claims: wrote {path.relative_to(DOCS.parent)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
