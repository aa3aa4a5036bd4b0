"""What the live page asks: a study's text predicted, its faults with their places, its report, and the runs that were saved."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import Fault, InputError
from simulator.base.files import ordinary, write_whole
from simulator.base.processes import cores
from simulator.base.schema import parse_toml
from simulator.cli.explore import answer_of
from simulator.cli.explore_points import Axis, Exploration, explored
from simulator.formats.editor_schema import study_schema
from simulator.formats.html import page
from simulator.formats.html.step import drawing_of
from simulator.formats.study import Study, read_study
from simulator.formats.writers.json_report import report
from simulator.predict import Prediction, predict
from simulator.spec.cluster.cluster import cluster_names
from simulator.spec.cluster.device import device_names
from simulator.spec.model.files import preset_names
from simulator.spec.software.stack import Stack

MOST_RUNS: Final = 9_999
_REMEMBERED: Final = 24  # predictions and what-ifs, for their pages
MOST_POINTS: Final = 500  # of a what-if: some seconds
_NOUNS: Final = ("model", "cluster", "placement", "calibration")
_RUN: Final = re.compile(r"run-(\d{4})\.toml")
_MOST_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class Predicted:
    """A study and its prediction."""

    study: Study
    prediction: Prediction

    def report(self) -> dict[str, Any]:
        return report(self.prediction, self.study.inputs())

    def page(self) -> str:
        """The page of `predict --html`."""
        return page("predict", self.report(), drawing_of(self.prediction, *self.study.parts))


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answer of `explore`."""

    answer: dict[str, Any]

    def page(self) -> str:
        """The page of `explore --html`."""
        return page("explore", self.answer)


class Runs:
    """Predictions of texts. folder: of the drafts and of what is kept; nothing is written elsewhere.

    beside: where names of files in a study are looked up.
    """

    def __init__(self, folder: Path, beside: Path) -> None:
        self._folder, self._beside = folder, beside
        self._lock, self._exploring = threading.Lock(), threading.Lock()
        self._known: OrderedDict[int, Predicted | WhatIf] = OrderedDict()
        self._count = 0

    def predicted(self, text: str) -> dict[str, Any]:
        """The report of a text and the number of its page, or its faults."""
        with self._lock:
            try:
                found = self._predict(text)
            except InputError as exc:
                return {"faults": [_plain_fault(fault) for fault in exc.faults]}
            return {"number": self._remembered(found), "answer": found.report()}

    def explored(self, text: str, varied: str, name: str) -> dict[str, Any]:
        """The number of the what-if page of a text at every combination of `KEY=V,V KEY=V,V`, or the faults.

        name: of the study, in the commands that the page shows.
        """
        with self._exploring:  # one at a time has all cores; predictions go on
            try:
                found = self._explore(text, varied.split(), name)
            except InputError as exc:
                return {"faults": [_plain_fault(fault) for fault in exc.faults]}
        with self._lock:
            return {"number": self._remembered(found), "count": len(found.answer["columns"]["verdict"])}

    def _remembered(self, found: Predicted | WhatIf) -> int:
        self._count += 1
        self._known[self._count] = found
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return self._count

    def _explore(self, text: str, varied: list[str], name: str) -> WhatIf:
        draft = self._folder / "what-if.draft.toml"
        write_whole(draft, text, "--folder")
        axes = tuple(Axis.parse(one) for one in varied)
        exploration = Exploration(file=draft, flags=self._files_named(text), settings=(), axes=axes)
        if not axes or len({axis.key for axis in axes}) < len(axes) or exploration.count > MOST_POINTS:
            remedy = f"each axis once, at most {MOST_POINTS:,} combinations here: tp=1,2 nodes=1,2; shardwise explore has more"
            raise InputError.at("what if", f"{exploration.count:,} combinations of {len(axes)} axes", remedy)
        found = exploration.check()
        records = explored(exploration, None, cores(), lambda *_: None)
        return WhatIf(answer_of(records, axes, exploration.points, found.inputs(), ["shardwise", "predict", name]))

    def _predict(self, text: str) -> Predicted:
        draft = self._folder / "draft.toml"
        write_whole(draft, text, "--folder")
        study = read_study(draft, self._files_named(text), {}, ())
        prediction = predict(*study.parts)
        return Predicted(study, replace(prediction, sources=(*study.sources, *prediction.sources)))

    def _files_named(self, text: str) -> dict[str, str]:
        """Inputs that name files relative to the study's folder, as absolute paths (the draft is elsewhere)."""
        try:
            data = parse_toml(text)
        except (ValueError, RecursionError):
            return {}
        named = {noun: data[noun] for noun in _NOUNS if isinstance(data.get(noun), str)}
        found = {noun: self._beside / name for noun, name in named.items() if name and "\0" not in name}
        return {noun: str(path) for noun, path in found.items() if _is_file(path)}

    def page(self, number: int) -> str | None:
        """The report of a prediction that is still known."""
        with self._lock:
            found = self._known.get(number)
            return None if found is None else found.page()

    def keep(self, number: int, text: str) -> dict[str, Any] | None:
        """Keep a run's text and answer in the folder; None where the prediction is not known any more."""
        with self._lock:
            found = self._known.get(number)
            if not isinstance(found, Predicted):
                return None
            name = f"run-{max(self._numbers(), default=0) + 1:04d}"
            write_whole(self._folder / f"{name}.toml", text, "--folder")
            answer = json.dumps(found.report(), indent=2, ensure_ascii=False, allow_nan=False)
            write_whole(self._folder / f"{name}.json", answer + "\n", "--folder")
            return {"kept": name}

    def _numbers(self) -> list[int]:
        names = (_RUN.fullmatch(path.name) for path in self._folder.iterdir())
        return [int(match[1]) for match in names if match and int(match[1]) < MOST_RUNS]

    def saved(self) -> list[dict[str, Any]]:
        """The runs of the folder, newest first: name, text and the figures of a list."""
        found = []
        for number in sorted(self._numbers(), reverse=True)[:200]:
            stem = self._folder / f"run-{number:04d}"
            try:
                text = ordinary(stem.with_suffix(".toml"), _MOST_BYTES).read_text(encoding="utf-8")
                answer = json.loads(ordinary(stem.with_suffix(".json"), 16 * _MOST_BYTES).read_text(encoding="utf-8"))
                figures = {
                    name: answer[name] for name in ("verdict", "step_s", "low_s", "high_s", "num_devices", "mfu")
                }
                figures["used_bytes"] = answer["memory"]["used_bytes"]
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue  # somebody else's file, or half of one
            found.append({"name": stem.name, "text": text, **figures})
        return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no system takes
        return False


def _plain_fault(fault: Fault) -> dict[str, str]:
    """A fault without the draft's path, which the user did not choose."""
    place = re.sub(r"^\S*draft\.toml:? ?", "", fault.place).removeprefix("--vary ")
    return {"place": place or "study", "problem": fault.problem, "remedy": fault.remedy}


def words() -> dict[str, Any]:
    """Completions: keys of every table with meaning and allowed values, names of presets."""
    schema = study_schema()
    tables: dict[str, dict[str, Any]] = {}
    _fields("", schema, schema["definitions"], tables)
    names = {"model": preset_names(), "cluster": cluster_names(), "plan.stack": Stack.names(), "device": device_names()}
    return {"tables": tables, "names": {key: list(found) for key, found in names.items()}}


def _fields(
    path: str, schema: Mapping[str, Any], definitions: Mapping[str, Any], out: dict[str, dict[str, Any]]
) -> None:
    """The keys of a table and of those below it; keys that have moved are left out."""
    table: dict[str, Any] = {}
    for key, field in schema.get("properties", {}).items():
        if field.get("deprecated"):
            continue
        table[key] = {"about": field.get("description", ""), "values": _values(field)}
        below = field.get("$ref") or next((one["$ref"] for one in field.get("anyOf", ()) if "$ref" in one), None)
        if below is not None:
            table[key]["table"] = True
            _fields(f"{path}.{key}".strip("."), definitions[below.rpartition("/")[2]], definitions, out)
    out[path] = table


def _values(field: Mapping[str, Any]) -> list[Any]:
    if field.get("type") == "boolean":
        return [True, False]
    found = list(field.get("enum", ())) + [one for each in field.get("anyOf", ()) for one in each.get("enum", ())]
    return found + ([field["const"]] if "const" in field else [])
