"""PyTorch's allocator settings in a launch script: the variable exported, set before a command, or passed by a launcher.

Of several names the newest holds: torch 2.13 reads PYTORCH_ALLOC_CONF first (c10/core/AllocatorConfig.h).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from simulator.base.errors import Fault
from simulator.formats.readers.plans.reading import Entry, Setting, shortened
from simulator.formats.readers.plans.shell_words import Word
from simulator.spec.plan.alloc_conf import VARIABLES, parse_alloc_conf

_PASSED: Final = re.compile(rf"(?:^|[=,])({'|'.join(VARIABLES)})=(.+)$")  # `env X=Y`, `-e X=Y`, `--export=ALL,X=Y`
_DRIVERS: Final = re.compile(r"(^|,)\s*backend\s*:\s*cudaMallocAsync\b")

Found = tuple[Entry | None, list[Setting], list[Fault]]


def allocator_of(
    variables: Mapping[str, Sequence[Word]], launcher: Sequence[Word], file: str, define: Collection[str]
) -> Found:
    """(its settings as text, what became of each variable, what is wrong).

    variables: the script's, by name, as words; define: those of them that the caller gives.
    """
    stated = {name: ("".join(word.text for word in words), words) for name, words in variables.items() if words}
    for word in launcher:
        if passed := _PASSED.search(word.text):
            stated[passed[1]] = passed[2], [word]
    found: Entry | None = None
    settings, faults = list[Setting](), list[Fault]()
    for name in (name for name in VARIABLES if name in stated):
        text, words = stated[name]
        place = f"--define {name}" if name in define else f"{file}:{words[0].line}"
        setting = {"name": name, "value": shortened(text)}
        unknown = [one.what for word in words for one in word.unknown]
        if unknown:
            note = f"hangs on {', '.join(unknown)}: taken as not set; --define {name}='…' gives it"
            settings.append(Setting(**{**setting, "value": "?"}, place=place, use="unknown", note=note))
        elif found is not None:
            settings.append(Setting(**setting, place=place, use="overruled", note=f"torch reads {found.name} first"))
        elif _DRIVERS.search(text):
            note = "the driver's pool has no published rules: PyTorch's own allocator is taken"
            settings.append(Setting(**setting, place=place, use="not modelled", note=note))
        else:
            faults += (wrong := _faults(name, text, place))
            if not wrong:
                found = Entry(name=name, value=text, place=place)
                settings.append(Setting(**setting, place=place, use="used", note="plan.memory.alloc_conf"))
    return found, settings, faults


def _faults(name: str, text: str, place: str) -> list[Fault]:
    try:
        parse_alloc_conf(text)
    except ValueError as exc:
        remedy = f"as torch takes it, or --define {name}= for none"
        return [Fault(place=f"{place}: {name}", problem=str(exc), remedy=remedy, flags=(("--define", f"{name}="),))]
    return []
