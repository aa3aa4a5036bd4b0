"""Every command, snippet and output that README and docs show: run, compared, counted and rewritten.

    python -m tests.documented                   what runs and what does not, with the reason of each
    python -m tests.documented --write [PAGE]    run, and put what is printed now where another output is shown
    python -m tests.documented --minutes         run what takes minutes too (nightly)

Pages are run as they are read, in one folder each with the files of docs/examples: `sh` line by line, `python` in one
namespace a page, `pycon` as a doctest. Each line of a `text` block must be printed by the blocks run since the text
before, in that order; a line `…` stands for what is left out. A comment above a block may say more:

    <!-- exit 4 -->                the exit code of its commands
    <!-- not run: REASON -->       one of the reasons below
    <!-- command 1 -->             README's installations: of them, only what `shardwise` is asked then
    <!-- run by FILE -->           a test that reads this block
    <!-- of FILE -->               the block stands in that file
    <!-- all of it -->             of a text: it is the whole output
"""

from __future__ import annotations

import doctest
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from simulator.cli import main

ROOT: Final = Path(__file__).resolve().parents[1]
EXAMPLES: Final = ROOT / "docs" / "examples"
PAGES: Final = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md")),
]
MINUTES: Final = "takes minutes"
REASONS: Final = {
    "needs a GPU": "CI has none",
    MINUTES: "run by --minutes",
    "measures this machine": "its output is of one machine",
    "asks this host": "nvidia-smi or a scheduler must be there",
    "asks the network": "CI has none",
    "your own files": "of the reader's",
    "it serves until Ctrl-C": "nobody presses it here",
    "a synopsis": "no command line, but the form of many",
    "a formula": "no output",
    "a file's form": "no output",
}
RUN: Final = ("sh", "python", "pycon")
_FENCE: Final = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?(?P<indent> *)```(?P<kind>[^\n]*)\n(?P<body>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_SHELL: Final = re.compile(r"[|;<>&$`*]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block. start, end: of its body in the page's text."""

    kind: str
    mark: str
    body: str
    start: int
    end: int
    line: int
    source: str  # of a text, the mark above what prints it

    def runs(self, *, minutes: bool = False) -> bool:
        return self.kind in RUN and _is_run(self.mark, minutes=minutes)

    def is_compared(self, *, minutes: bool = False) -> bool:
        return self.kind == "text" and all(_is_run(mark, minutes=minutes) for mark in (self.mark, self.source))


def _is_run(mark: str, *, minutes: bool) -> bool:
    return not mark.startswith(("not run: ", "run by ", "of ")) or (minutes and mark == f"not run: {MINUTES}")


def blocks(page: Path) -> list[Block]:
    """Of a page, in order."""
    text = page.read_text(encoding="utf-8")
    made, source = [], ""
    for found in _FENCE.finditer(text):
        kind, mark = found["kind"], found["mark"] or ""
        source = mark if kind in RUN else source
        start, end = found.span("body")
        line = text.count("\n", 0, start)
        made.append(Block(kind=kind, mark=mark, body=found["body"], start=start, end=end, line=line, source=source))
    return made


def known(mark: str) -> bool:
    """Whether a comment above a block is one that this module understands."""
    reasons = "|".join(map(re.escape, REASONS))
    if found := re.fullmatch(r"(?:run by|of) ([\w./-]+)", mark):
        return (ROOT / found[1]).is_file()
    return re.fullmatch(rf"exit \d|command \d|all of it|not run: ({reasons})", mark) is not None


@dataclass(slots=True)
class Page:
    """A page that is being run in the present folder. faults: what is wrong with it, a line each."""

    path: Path
    minutes: bool = False
    printed: str = ""  # since the last text
    read_on: bool = False  # something was run since the last text
    at: int = 0  # of what was printed, where the last line that is shown ends
    faults: list[str] = field(default_factory=list)
    texts: list[tuple[Block, str]] = field(default_factory=list)  # what should stand there
    names: dict[str, object] = field(default_factory=lambda: {"__name__": "__main__"})

    def play(self) -> None:
        """Run its blocks, and compare what it shows."""
        for block in blocks(self.path):
            if block.is_compared(minutes=self.minutes):
                self._compare(block)
            elif block.runs(minutes=self.minutes):
                if not self.read_on:
                    self.printed, self.at, self.read_on = "", 0, True
                self._run(block)

    def _fault(self, block: Block, words: str) -> None:
        self.faults.append(f"{self.path.relative_to(ROOT)}:{block.line}: {words}")

    def _run(self, block: Block) -> None:
        if block.kind == "sh":
            apart = block.mark == f"not run: {MINUTES}"  # what has processes of its own needs real streams
            due = int(block.mark.removeprefix("exit ")) if block.mark.startswith("exit ") else 0
            for line in _lines(block):
                try:
                    code, said = answer(line, apart=apart)
                except Exception as exc:  # noqa: BLE001  a defect; the other lines are run all the same
                    self._fault(block, f"{line}: ends in {exc!r}")
                    continue
                self.printed += said
                if code != due:
                    self._fault(block, f"{line}: exit code {code} instead of {due}: {said[-500:]}")
            return
        with redirect_stdout(io.StringIO()) as out:
            if block.kind == "pycon":
                test = doctest.DocTestParser().get_doctest(block.body, self.names, self.path.name, None, block.line)
                failed = doctest.DocTestRunner(verbose=False).run(test, clear_globs=False).failed
                if failed:
                    self._fault(block, out.getvalue())
            else:
                exec(compile(block.body, f"{self.path.name}:{block.line}", "exec"), self.names)  # noqa: S102
        self.printed += out.getvalue()

    def _compare(self, block: Block) -> None:
        """Each line follows the one before in what was printed; of others the nearest is what should stand there."""
        self.read_on = False
        if block.mark == "all of it":
            self.texts.append((block, self.printed))
            if block.body != self.printed:
                self._fault(block, "is not what is printed now: python -m tests.documented --write")
            return
        right = []
        for line in block.body.splitlines():
            at = self.printed.find(line.strip(), self.at) if line.strip() not in ("", "…") else self.at
            right.append(line)
            if at < 0:
                right[-1] = self._nearest(line)
                self._fault(block, f"shows {line!r}, and now it is {right[-1]!r}")
            else:
                self.at = at + len(line.strip())
        self.texts.append((block, "".join(f"{line}\n" for line in right)))

    def _nearest(self, line: str) -> str:
        near = get_close_matches(line, self.printed[self.at :].splitlines(), n=1, cutoff=0.4)
        if not near:
            return line
        self.at = self.printed.index(near[0], self.at) + len(near[0])
        return near[0]

    def rewritten(self) -> str:
        """The page with what is printed now."""
        text = self.path.read_text(encoding="utf-8")
        for block, body in reversed(self.texts):
            text = text[: block.start] + body + text[block.end :]
        return text


def _lines(block: Block) -> list[str]:
    """The commands of a block of `sh`."""
    lines = [line for line in block.body.replace("\\\n", " ").splitlines() if line.strip()]
    if block.mark.startswith("command "):
        return [line.rpartition(".venv/bin/")[2] for line in lines if ".venv/bin/shardwise" in line]
    return lines


def answer(line: str, *, apart: bool = False) -> tuple[int, str]:
    """The exit code of a line and all that it prints; what a shell must read is run by one that finds `shardwise`.

    apart: in a process of its own in any case.
    """
    words = shlex.split(line, comments=True)
    if not words:
        return 0, ""
    if words[0] == "shardwise" and not apart and not _SHELL.search(line.partition(" #")[0]):
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = int(main(words[1:]))
        return code, err.getvalue() + out.getvalue()
    here = Path("bin").resolve()
    here.mkdir(exist_ok=True)
    for name, told in {"shardwise": " -m simulator.cli", "python": ""}.items():
        (here / name).write_text(f'#!/bin/sh\nexec {sys.executable}{told} "$@"\n')
        (here / name).chmod(0o755)
    paths = os.pathsep.join((str(here), os.environ["PATH"]))
    surroundings = os.environ | {"PATH": paths, "PYTHONPATH": str(ROOT)}
    run = ["bash", "-o", "pipefail", "-c", line]
    done = subprocess.run(run, check=False, env=surroundings, capture_output=True, text=True)
    return done.returncode, done.stderr + done.stdout


def played(path: Path, folder: Path, *, minutes: bool = False) -> Page:
    """A page, run in a new folder that looks like the checkout, among the examples."""
    here = folder / "docs" / "examples"
    shutil.copytree(EXAMPLES, here)
    (folder / "experiments").symlink_to(ROOT / "experiments")
    page = Page(path, minutes=minutes)
    with chdir(here):
        page.play()
    return page


def counts() -> tuple[Counter[str], list[tuple[str, Block]]]:
    """How many blocks of each kind run or are compared, and those that are not."""
    every = [(str(page.relative_to(ROOT)), block) for page in PAGES for block in blocks(page)]
    here = Counter(block.kind for _, block in every if block.runs() or block.is_compared())
    return here, [(page, block) for page, block in every if block.mark.startswith("not run: ")]


def _listing() -> Iterator[str]:
    here, left = counts()
    yield ", ".join(f"{number} {kind}" for kind, number in sorted(here.items())) + " run or compared"
    for reason in REASONS:
        found = [f"{page}:{block.line}" for page, block in left if block.mark == f"not run: {reason}"]
        if found:
            yield f"{len(found)} not run: {reason} ({REASONS[reason]}): {', '.join(found)}"


def command(words: list[str]) -> int:
    """Run, count or rewrite, as the words say."""
    if not words:
        print("\n".join(_listing()))
        return 0
    named = [word for word in words if not word.startswith("--")]
    os.environ.pop("COLUMNS", None)
    faults = []
    for path in PAGES:
        if not any(block.runs(minutes="--minutes" in words) for block in blocks(path)):
            continue
        if named and not any(name in str(path) for name in named):
            continue
        with TemporaryDirectory() as folder:
            page = played(path, Path(folder) / "checkout", minutes="--minutes" in words)
        faults += page.faults
        if "--write" in words:
            path.write_text(page.rewritten(), encoding="utf-8")
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(command(sys.argv[1:]))
