"""What the command line answers to the studies of this folder, written down: shared by the test and `regenerate.py`.

A study (`studies/NAME.toml`) has `about`, `commands` (what stands behind `shardwise`, run one after the other in one
empty folder) and `[files]` (name = text, laid there before). Its record (`expected/NAME.json`) holds, for each command,
exit code, both streams, and figures and digest of what `--json` prints; then every file that was written. It knows the
command line only, so it outlives any move of modules. A command makes one answer, of which text, JSON, trace and snapshot
are written; that `--json` prints the same, `test_studies.py` asks of three commands.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import os
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

from simulator.base.errors import json_text
from simulator.cli import main, options, progress

HERE: Final = Path(__file__).parent
STUDIES: Final = HERE / "studies"
EXPECTED: Final = HERE / "expected"
MAX_LINES: Final = 80  # longer text is kept as its digest

TRACE_AND_SNAPSHOT: Final = {"trace": "trace.json.gz", "snapshot": "snapshot.pickle"}  # written of a prediction besides
SURROUNDINGS: Final = {"COLUMNS": "120", "NO_COLOR": "1", "LC_ALL": "C", "TZ": "UTC"}

# Of each verb that has --json: the leaves that are written out, so that a change can be read. The digest covers all.
FIGURES: Final[dict[str, tuple[str, ...]]] = {
    "predict": (
        "verdict",
        *("step_s", "low_s", "high_s", "lower_s", "upper_s", "mfu"),
        *("breakdown_s.*", "communication.*", "checkpoint.*", "kinds.*.used_bytes", "remedies.*.step_s"),
        *("memory.peak_*", "memory.outside_torch_bytes", "memory.*host_bytes", "memory.by_category.*"),
    ),
    "serve": (
        *("verdict", "latencies.*", "load.capacity_per_s", "memory.*_bytes", "costs.*.million_tokens"),
        *("handed_over.*", "gpus", "least_gpus", "plans.*.gpus", "plans.*.capacity_per_s", "nearest.gpus"),
    ),
    "search": (
        "counts.*",
        "plans.*.plan.*",
        "plans.*.step_s",
        "plans.*.used_bytes",
        "sizes.*.step_s",
        "sizes.*.plan.*",
    ),
    "place": ("default.*", "placed.*", "gain", "plan_changes.*", "rank_order", "num_p*"),
    "goodput": ("step_s", "mtbf_s", "interval_s", "saving", "days.*", "goodput.*", "dollars.*", "expected_days"),
    "compare": ("subjects.*.name", "subjects.*.step_s", "subjects.*.used_bytes", "subjects.*.ratio", "subjects.*.run"),
    "sensitivity": ("figure", "best", "inputs.*", "now.*", "spread.*", "wins.*", "indices.*.total", "num_*"),
    "backtest": ("rows.*.status", "rows.*.predicted_*", "rows.*.algorithm", "rows.*.protocol", "groups.*_error"),
    "export": ("format",),
    "topo": ("format",),
    "collective": ("rows.*.time_s", "crossovers.*.size_bytes"),
    "replay": ("exact", "num_events", "peaks.*"),
}


def names() -> list[str]:
    """The studies, by name."""
    return sorted(file.stem for file in STUDIES.glob("*.toml"))


def expected(name: str) -> dict[str, Any] | None:
    """What the study answered when it was last written down; None for a new one."""
    file = EXPECTED / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def text_of(record: dict[str, Any]) -> str:
    """A record as its file."""
    return json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def record(name: str) -> dict[str, Any]:
    """What the study answers now."""
    study = tomllib.loads((STUDIES / f"{name}.toml").read_text(encoding="utf-8"))
    laid: dict[str, str] = study.get("files", {})
    with TemporaryDirectory() as folder, chdir(folder), _surroundings():
        for file, text in laid.items():
            Path(file).write_text(text, encoding="utf-8")
        runs = [_run(shlex.split(command)) for command in study["commands"]]
        written = {file: _content(Path(file)) for file in _files() if file not in laid}
    return {"runs": runs, "written": written}


def changes(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """The leaves that differ, a line each: where, before, now."""
    before, now = dict(_leaves(old, place)), dict(_leaves(new, place))
    for leaf in sorted(before.keys() | now.keys()):
        was, is_ = before.get(leaf, "(nothing)"), now.get(leaf, "(nothing)")
        if type(was) is not type(is_) or was != is_:
            yield f"{leaf}: {was} → {is_}{_moved(was, is_)}"


def _run(arguments: Sequence[str]) -> dict[str, Any]:
    verb, asked, more = arguments[0], Asked(), _besides(arguments)
    with asked.listening():
        code, out, err = answer([*arguments, *more])
        if more and not out:  # the hints of an error repeat its command line
            code, out, err = answer(arguments)
    also = tuple(f"{what} written to {file}" for what, file in TRACE_AND_SNAPSHOT.items() if more)
    run: dict[str, Any] = {
        "command": shlex.join(arguments),
        "exit_code": code,
        "stdout": _text(out),
        "stderr": [line for line in err.splitlines() if not line.startswith(also)],
    }
    if out and verb in FIGURES:
        run["json"] = _json(verb, asked.json or answer([*arguments, "--json"])[1])
    return run


def _besides(arguments: Sequence[str]) -> list[str]:
    """What a prediction is asked to write that the study does not ask for."""
    if arguments[0] != "predict" or "--snapshot" in arguments:
        return []
    return [word for what, file in TRACE_AND_SNAPSHOT.items() for word in (f"--{what}", file)]


@dataclass
class Asked:
    """The JSON of the last answer that was printed as text; empty if it was of a kind of its own."""

    json: str = ""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While commands are run."""
        page = options.also_as_page

        def also_as_page(kind: str, data: Callable[[], Mapping[str, Any]], *drawing: Any) -> None:
            self.json = json_text(data()) + "\n"
            page(kind, data, *drawing)

        with patch.object(options, "also_as_page", also_as_page):
            yield


def answer(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Exit code and both streams of a command."""
    quiet = patch.object(progress, "_FIRST_S", math.inf)  # no line of a slow machine's in an answer
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err, quiet:
        code = int(main(list(arguments)))
    return code, out.getvalue(), err.getvalue()


def _json(verb: str, text: str) -> dict[str, Any]:
    leaves = _leaves(json.loads(text), "")
    figures = {key: value for key, value in leaves if any(fnmatchcase(key, wanted) for wanted in FIGURES[verb])}
    return {"sha256": _digest(text.encode()), "figures": figures}


def _leaves(data: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict | list) and data:
        items = data.items() if isinstance(data, dict) else enumerate(data)
        for key, value in items:
            yield from _leaves(value, f"{place}.{key}" if place else str(key))
    else:
        yield place, data


def _moved(was: object, is_: object) -> str:
    if isinstance(was, int | float) and isinstance(is_, int | float) and was:
        return f" ({100 * (is_ / was - 1):+.2g} %)"
    return ""


def _files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def _content(file: Path) -> list[str] | str:
    """A written file; what is compressed is unpacked, as its header may have a clock."""
    data = file.read_bytes()
    data = gzip.decompress(data) if file.suffix == ".gz" else data
    try:
        return _text(data.decode()) if file.suffix not in (".gz", ".pickle") else _digest(data)
    except UnicodeDecodeError:
        return _digest(data)


def _text(text: str) -> list[str] | str:
    """Lines where they are few, else a digest."""
    lines = text.splitlines()
    return lines if len(lines) <= MAX_LINES and len(text) < MAX_LINES * 160 else _digest(text.encode())


def _digest(data: bytes) -> str:
    return f"sha256 {hashlib.sha256(data).hexdigest()}"


@contextmanager
def _surroundings() -> Iterator[None]:
    """The same terminal and language everywhere, and no scheduler's variables."""
    kept = dict(os.environ)
    for key in [key for key in kept if key.startswith(("SLURM_", "NCCL_", "FI_", "CUDA_"))]:
        del os.environ[key]
    os.environ.update(SURROUNDINGS)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
