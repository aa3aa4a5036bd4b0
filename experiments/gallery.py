"""The site's gallery: answers to a few questions, as text, pictures, traces and pages that open without a server.

    python experiments/gallery.py [DIR]     writes DIR (build/gallery): index.md and the files that it names

Where a command has `--html`, its report is made too.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from simulator.cli import main as shardwise_main
from simulator.cli import shardwise

ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A question with its command. files: option -> the file that it writes."""

    name: str
    title: str
    command: str
    files: dict[str, str]


STEP: Final = {
    "--trace": "trace.json.gz",
    "--memory": "memory.png",
    "--links": "links.svg",
    "--snapshot": "memory.pickle",
}
ENTRIES: Final = (
    Entry(name="8b", title="Llama 3 8B on eight H100", command="predict", files=STEP),
    Entry(
        name="70b-pipeline",
        title="Llama 3 70B on eight nodes: tensor and pipeline parallelism",
        command="predict --model llama3-70b --nodes 8 --tp 8 --pp 4 --num-micro-batches 16 --sequence-parallel true"
        " --data-parallel megatron --zero 1 --seq-len 8192",
        files={"--trace": "trace.json.gz", "--memory": "memory.png"},
    ),
    Entry(name="what-if", title="Two studies, and a faster network", command="compare a.toml b.toml", files={}),
    Entry(name="days", title="Days and dollars of a long run", command="goodput long-run.toml --prices prices.toml", files={}),
    Entry(name="serving", title="Eight requests a second", command="serve --tp 2 --rate 8 --slo-ttft 300ms", files={}),
    Entry(name="topology", title="A host's topology", command="topo hgx-h100-8", files={}),
    Entry(name="placement", title="The GPU of each rank", command="place --cluster dgx1-v100-8 --model llama3.2-1b --tp 2 --precision fp16", files={}),
    Entry(name="allocator", title="A recorded step through seven allocators", command="replay snapshot.json.gz --compare-policies", files={}),
)  # fmt: skip
_OPENED: Final = {
    "trace.json.gz": "open it at <https://ui.perfetto.dev>",
    "memory.pickle": "open it at <https://pytorch.org/memory_viz>",
    "report.html": "opens anywhere, without a network",
}


def main() -> int:
    """Write the gallery into a folder that may have an older one."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "gallery").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.pop("COLUMNS", None)
    lines = ["# Gallery", "", "What the commands answer, made by `experiments/gallery.py`."]
    with chdir(ROOT / "docs" / "examples"):
        for entry in ENTRIES:
            lines += ["", *_shown(entry, folder)]
    (folder / "index.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def _shown(entry: Entry, folder: Path) -> Iterator[str]:
    """One entry's lines, after its files are written."""
    wanted = entry.files | ({"--html": "report.html"} if _has_html(entry) else {})
    written = {option: f"{entry.name}-{name}" for option, name in wanted.items()}
    words = shlex.split(entry.command)
    for option, name in written.items():
        words += [option, str(folder / name)]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = int(shardwise_main(words))
    if code not in (0, 4):
        raise SystemExit(f"{entry.command}: exit code {code}\n{err.getvalue()}")
    yield from (f"## {entry.title}", "", "```text", f"$ shardwise {entry.command}", out.getvalue().rstrip(), "```", "")
    for option, name in written.items():
        if name.endswith((".svg", ".png")):
            yield from (f"![{option}]({name})", "")
        else:
            yield f"- [{name}]({name}), by `{option}`: {_OPENED[wanted[option]]}"


def _has_html(entry: Entry) -> bool:
    command = shardwise.get_command(click.Context(shardwise), entry.command.split()[0])
    return command is not None and any("--html" in one.opts for one in command.params)


if __name__ == "__main__":
    raise SystemExit(main())
