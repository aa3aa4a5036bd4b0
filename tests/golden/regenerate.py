"""Write down what the golden studies answer, and print what changed: `python tests/golden/regenerate.py [NAME ...]`.

With --check nothing is written, and the exit code is 1 where something changed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.golden import recording


def main() -> int:
    """Record every study that was named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="studies; default all")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where something changed")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(recording.names())):
        parser.error(f"no such study: {', '.join(unknown)}")
    changed = sum(update(name, write=not arguments.check) for name in arguments.names or recording.names())
    orphans = sorted({file.stem for file in recording.EXPECTED.glob("*.json")} - set(recording.names()))
    print(f"{changed} changed" + "".join(f"\nno study any more: expected/{name}.json" for name in orphans))
    return int(arguments.check and bool(changed or orphans))


def update(name: str, *, write: bool) -> bool:
    """Record one study, and print how it differs from what was known."""
    known, now = recording.expected(name), recording.record(name)
    if known == now:
        return False
    print(f"{name}: new" if known is None else "\n  ".join([f"{name}:", *recording.changes(known, now)]), flush=True)
    if write:
        recording.EXPECTED.mkdir(exist_ok=True)
        (recording.EXPECTED / f"{name}.json").write_text(recording.text_of(now), encoding="utf-8")
    return True


if __name__ == "__main__":
    sys.exit(main())
