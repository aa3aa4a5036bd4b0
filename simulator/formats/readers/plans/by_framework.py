"""Files of fine-tuning frameworks by the framework's name: their text, their settings as plain data, their plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import PlanError
from simulator.base.files import ordinary
from simulator.base.schema import unreadable
from simulator.formats.readers.plans.draft import Draft
from simulator.formats.readers.plans.reading import Stated

MAX_BYTES: Final = 2**20


def text_of(path: Path) -> str:
    """The text of a file of at most MAX_BYTES, UTF-8. Raises PlanError."""
    try:
        if not path.is_char_device():  # which has no size and no end: the bound below is for it
            ordinary(path)
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise PlanError.at(str(path), f"is larger than {MAX_BYTES} bytes", "a plan's file")
        return data.decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as exc:
        raise PlanError(unreadable(path, exc)) from None


def settings_of(form: str, text: str, file: str, define: Mapping[str, str]) -> dict[str, Any]:
    """A file's settings as plain data."""
    if form in ("litgpt", "unsloth", "xtuner"):
        from simulator.formats.readers.plans.further_tuning import further_settings

        return further_settings(form, text, file, define)
    if form == "transformers" and file.endswith(".py"):
        from simulator.formats.readers.plans.trainer_script import trainer_settings

        return trainer_settings(text, file)
    from simulator.formats.readers.yaml_document import read_yaml

    return read_yaml(text, file)


def read_stated(form: str, stated: Stated) -> Draft:
    """The plan of a fine-tuning framework's settings."""
    read: Callable[[Stated], Draft]
    match form:
        case "litgpt" | "unsloth" | "xtuner" | "ms-swift" | "verl":
            from simulator.formats.readers.plans.further_tuning import READERS

            read = READERS[form]
        case "megatron-bridge":
            from simulator.formats.readers.plans.megatron_bridge import read_megatron_bridge as read
        case "axolotl":
            from simulator.formats.readers.plans.axolotl import read_axolotl as read
        case "llama-factory":
            from simulator.formats.readers.plans.llama_factory import read_llama_factory as read
        case "torchtune":
            from simulator.formats.readers.plans.torchtune import read_torchtune as read
        case _:
            from simulator.formats.readers.plans.transformers import read_transformers as read
    return read(stated)
