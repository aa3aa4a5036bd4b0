"""`python -m tests.campaign.same`: studies answered under other hash seeds, numbers of processes, locales and time zones.

Each study, one of every command and reader and more of those that take --jobs, is answered in each of `RUNS`, and by each
--python besides: what it prints and writes must be the same, byte for byte. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.campaign.cases import cleared, played
from tests.campaign.kills import WORKS
from tests.campaign.mutate import options_of
from tests.campaign.seeds import EXAMPLES, ROOT, Seed, seeds
from tests.campaign.worker import warm

RUNS: Final = (
    {"PYTHONHASHSEED": "0", "jobs": "1", "LC_ALL": "C.UTF-8", "TZ": "UTC"},
    {"PYTHONHASHSEED": "1", "jobs": "2", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TZ": "Asia/Tokyo"},
    {"PYTHONHASHSEED": "4242", "jobs": "8", "LC_ALL": "POSIX", "TZ": "America/St_Johns"},
)  # fmt: skip
# They measure this machine, run what is on it, or wait for somebody
_NOT_ASKED: Final = frozenset(
    {"burnt", "captured", "rehearsed", "played", "program played", "measured", "asked", "doctor"}
)
_HGX: Final = "--cluster hgx-h100-8"
_MORE: Final = {
    "search of a mixture": f"search --model olmoe-1b-7b {_HGX} --nodes 1 --global-batch 8 --seq-len 512 --fix pp=1 --fix cp=1 --fix recompute=none --json",
    "search on two nodes": f"search --model gpt2 {_HGX} --nodes 2 --global-batch 32 --seq-len 256 --fix cp=1 --fix tp=1 --html page.html",
    "search for three": f"search --model llama3.2-1b {_HGX} --nodes 1 --global-batch 16 --seq-len 1024 --fix cp=1 --fix pp=1 --top 3 --plain",
    "explored in two directions": f"explore --model gpt2 {_HGX} --set plan.seq_len=256 --vary plan.tp=1,2 --vary plan.zero=0,1,2 --html page.html --json",
    "explored over illegal plans": f"explore --model gpt2 {_HGX} --set plan.seq_len=256 --vary plan.tp=1,3,4,5 --json",
    "two links varied": f"sensitivity --model gpt2 {_HGX} --nodes 2 --set plan.seq_len=256 --vary link.inter.bytes_per_s=100Gb/s..400Gb/s --vary link.intra.bytes_per_s=200GB/s..450GB/s --samples 16 --json",
    "servers of a mixture": f"serve --model olmoe-1b-7b {_HGX} --rate 4 --requests 20 --prompt 64 --output 16 --search --slo-ttft 1s --max-gpus 4 --json",
    "servers without a plan that serves": f"serve --model llama3.2-1b {_HGX} --rate 4 --requests 10 --prompt 64 --output 16 --search --slo-ttft 1us --max-gpus 2 --json",
    "a table beside a page": "backtest runs.csv --html page.html",
}  # fmt: skip


def studies(*, journals: bool = True) -> list[Seed]:
    """Those that take --jobs first."""
    known = [one for one in seeds(journals=journals) if one.name not in _NOT_ASKED]
    more = [
        (f"{name} with --jobs", work.command, work.files)
        for name, work in WORKS.items()
        if work.same and name != "capture"
    ]
    more += [(name, command, {"runs.csv": (EXAMPLES / "runs.csv").read_bytes()}) for name, command in _MORE.items()]
    found = [Seed(name=name, argv=tuple(command.split()), files=dict(files)) for name, command, files in more]
    return sorted((*found, *known), key=lambda one: not _takes_jobs(one))


def _takes_jobs(one: Seed) -> bool:
    known = any("--jobs" in option.opts for option in options_of(one.argv))
    return known and (one.argv[0] != "serve" or "--search" in one.argv)


def with_jobs(one: Seed, jobs: str) -> Seed:
    """The study in so many processes."""
    if not _takes_jobs(one):
        return one
    words = list(one.argv)
    if "--jobs" in words:
        words[words.index("--jobs") + 1] = jobs
        return replace(one, argv=tuple(words))
    return replace(one, argv=(*words, "--jobs", jobs))


def answers(one: Seed, folder: Path) -> dict[str, str]:
    """SHA-256 of what a study prints and of each file that it writes, by name. Journals are what their rows say, not their pages."""
    folder.mkdir()
    try:
        ended = played(one, folder)
        written = {
            str(path.relative_to(folder)): _content(path) for path in sorted(folder.rglob("*")) if path.is_file()
        }
    finally:
        cleared(folder)
    outputs = {name: data for name, data in written.items() if name not in one.files and ".journal" not in name}
    found = {"exit code": str(ended.status).encode(), "stdout": ended.stdout, **outputs}
    return {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}


def _content(path: Path) -> bytes:
    """What is in a file; of a compressed one what it holds, since libraries compress differently."""
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def differences(runs: Mapping[str, Mapping[str, Mapping[str, str]]]) -> list[str]:
    """What differs from the first run, by run and study."""
    first, *others = runs
    return [
        f"{study}: {name} of [{other}] differs from [{first}]"
        for other in others
        for study, found in runs[first].items()
        for name in sorted({*found, *runs[other].get(study, {})})
        if found.get(name) != runs[other].get(study, {}).get(name)
    ]


def _run(setting: Mapping[str, str], python: str, many: int, scratch: Path) -> dict[str, dict[str, str]]:
    """Digests of all studies in a process with this environment, whose folder is the same for all."""
    environment = {name: value for name, value in setting.items() if name != "jobs"}
    command = [
        python,
        "-m",
        "tests.campaign.same",
        "--studies",
        str(many),
        "--jobs",
        setting["jobs"],
        "--folder",
        str(scratch / "here"),
    ]
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONUTF8", "LANG", "LC_ALL")}
    done = subprocess.run(
        command, cwd=ROOT, env={**inherited, "PYTHONPATH": str(ROOT), **environment}, stdout=subprocess.PIPE, check=True
    )
    return {study: dict(found) for study, found in json.loads(done.stdout).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000, help="the first so many")
    parser.add_argument("--python", action="append", default=[], help="another interpreter, which has the packages")
    parser.add_argument("--jobs", help=argparse.SUPPRESS)  # with --folder: one of the runs
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        warm()
        chosen = studies()[: options.studies]
        print(json.dumps({one.name: answers(with_jobs(one, options.jobs), options.folder) for one in chosen}))
        return 0
    runs = {}
    with tempfile.TemporaryDirectory(prefix="same-") as scratch:
        for python, one in ((sys.executable, one) for one in RUNS):
            runs[" ".join(one.values())] = _run(one, python, options.studies, Path(scratch))
        for python in options.python:
            runs[python] = _run(RUNS[1], python, options.studies, Path(scratch))
    found = differences(runs)
    print("\n".join(found))
    print(f"{len(next(iter(runs.values())))} studies in {len(runs)} runs, {len(found)} differences")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
