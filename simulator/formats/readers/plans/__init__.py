"""Plans from other frameworks' files: recognised by content, read into a `Draft`, completed with the number of GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import PlanError
from simulator.base.schema import is_python, parse_json, parse_toml, read_json
from simulator.formats.readers import PLAN_FORMATS
from simulator.formats.readers.plans.by_framework import read_stated, settings_of, text_of
from simulator.formats.readers.plans.draft import GPUS, Draft, drafted_fields, plan_fields
from simulator.formats.readers.plans.reading import AUTO, Stated
from simulator.formats.readers.plans.tuning_command import LAUNCHES, NAMED
from simulator.spec.plan import Plan

__all__ = ["GPUS", "Draft", "detect", "drafted_fields", "plan_fields", "read_plan"]

_KEYED: Final = re.compile(r"([ \t]*(#[^\n]*)?\n)*[ \t]*(\w+[ \t]*[:=]\s|\[)")  # YAML or TOML
_OTHERS: Final = (".py", ".json", ".toml", ".yaml", ".yml")
_FOLDERS_ABOVE: Final = 5  # examples lie below the folder that their paths start from
_DEEPSPEED: Final = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"}
_TORCHTITAN: Final = {"parallelism", "training", "activation_checkpoint", "job"}
_ACCELERATE: Final = {"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"}
# Keys that no other format has: the first format of which one is there
_TUNING: Final[Mapping[str, frozenset[str]]] = {
    "axolotl": frozenset({"base_model"}),
    "llama-factory": frozenset({"finetuning_type", "cutoff_len", "lora_target"}),
    "litgpt": frozenset({"checkpoint_dir", "initial_checkpoint_dir"}),
    "transformers": frozenset({"per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type", "use_peft"}),
}
# Lines that no other format has
_LINES: Final = {
    "litgpt": re.compile(r"^(initial_)?checkpoint_dir\s*:", re.MULTILINE),
    "torchtune": re.compile(r"(?:^[ \t]+|[{,][ \t]*)_component_\s*:", re.MULTILINE),
    "unsloth": re.compile(r"^training:\s*\n[ \t]+training_type\s*:|^[ \t]*(from|import) unsloth\b", re.MULTILINE),
    "megatron-bridge": re.compile(
        r"^(?:train|ddp|peft|model):[ \t]*(?:#.*)?\n(?:(?:[ \t].*|#.*)?\n)*?[ \t]+(?:train_iters|tensor_model_parallel_size|global_batch_size|grad_reduce_in_fp32|_target_: megatron\.bridge\.\S+)\b",
        re.MULTILINE,
    ),
    "xtuner": re.compile(r"^[ \t]*(from|import) xtuner\b", re.MULTILINE),
}
_MEGATRON: Final = re.compile(r"--(micro-batch-size|num-layers|hidden-size|seq-length|tensor-model-parallel-size)\b")


def read_plan(
    path: Path, form: str | None = None, given: Collection[str] = (), define: Mapping[str, str] | None = None
) -> Draft:
    """The plan of a file in any of PLAN_FORMATS. Raises PlanError where the file cannot be read as one at all.

    form: None: found out from the content. given: Plan's fields that the caller states beside the file.
    define: variables of a shell script that its environment would set.
    """
    text = text_of(path)
    form = form or detect(text, str(path))
    match form:
        case "megatron":
            from simulator.formats.readers.plans.megatron import read_megatron

            return read_megatron(text, str(path), given, define)
        case "deepspeed":
            from simulator.formats.readers.plans.deepspeed import read_deepspeed

            data, notes = _template(text, path, define or {})
            return replace(read_deepspeed(data, str(path), given), notes=notes)
        case "search":
            from simulator.formats.readers.plans.search_report import read_search

            return read_search(_json(path), str(path), define or {})
        case "torchtitan":
            from simulator.formats.readers.plans.torchtitan import read_torchtitan

            job = _json(path) if text.lstrip().startswith("{") else _toml(text, path)
            return read_torchtitan(job, str(path), given)
        case "toml":
            return _own(_toml(text, path), path)
        case _:
            return _of_yaml(form, text, path, given, define or {})


def _of_yaml(form: str, text: str, path: Path, given: Collection[str], define: Mapping[str, str]) -> Draft:
    """Accelerate's file or a fine-tuning framework's, in YAML or in JSON, which is YAML too; or a script that names one."""
    file = str(path)
    read_json = partial(_beside, path.parent)
    if form == "launch":
        from simulator.formats.readers.plans.tuning_launch import read_tuning_launch

        return read_tuning_launch(path, text, given, define, lambda name: _located(path.parent, name), read_json)
    data = settings_of(form, text, file, define)
    if form == "accelerate":
        from simulator.formats.readers.plans.accelerate import read_accelerate

        return read_accelerate(data, file, read_json, given)
    recipe = (define.get("recipe") or recipe_of(text)) if form == "torchtune" else ""
    if form == "transformers" and file.endswith(".py"):
        from simulator.formats.readers.plans.trainer_script import program_of

        recipe = program_of(text)
    stated = Stated(data=data, file=file, read_json=read_json, given=given, program=recipe)
    if form == "megatron-bridge":
        from simulator.formats.readers.plans.megatron_bridge import stated_over

        stated = stated_over(stated, define.get("recipe", ""))
    return read_stated(form, stated)


def recipe_of(text: str) -> str:
    """Torchtune's recipe, which its file names only in comments and paths; "" where it names none."""
    found = re.search(
        r"\b(full|lora|qat)_(finetune_)?(lora_)?(finetune_)?(single_device|distributed)\b|single_device", text
    )
    return found[0] if found else ""


def _script_form(text: str, file: str) -> str | None:
    """The format of a script's commands: other libraries' programs by name, Megatron's by its arguments; None: not a script."""
    shell, other = text.startswith("#!"), Path(file).suffix in _OTHERS
    if (shell or not other) and NAMED.search(text):
        return "launch"
    if _MEGATRON.search(text):
        return "megatron"
    return "launch" if (shell or not other) and not _KEYED.match(text) and LAUNCHES.search(text) else None


def detect(text: str, file: str) -> str:
    """Which of PLAN_FORMATS a file is in. Raises PlanError where it is in none."""
    if OPENS.match(text):
        return _detect_json(strict(text, {})[0], file)
    if (script := _script_form(text, file)) is not None:
        return script
    table = _quietly(parse_toml, text)
    if isinstance(table, dict) and table:
        if any(isinstance(table.get(key), dict) for key in _TORCHTITAN):
            return "torchtitan"
        if "plan" in table or set(table) & set(Plan.written_fields()):
            return "toml"
    line = next((form for form, pattern in _LINES.items() if pattern.search(text)), None)
    if line is not None or file.endswith(".py"):
        return line or _python_form(text, file)
    keys = frozenset(re.findall(r"^(\w+)\s*:", text, re.MULTILINE))
    if keys & (_ACCELERATE | frozenset().union(*_TUNING.values())):
        return next((form for form, own in _TUNING.items() if keys & own), "accelerate")
    problem = "is in no format that holds a plan"
    raise PlanError.at(file, problem, f"one of {', '.join(PLAN_FORMATS)}; --plan-format forces one")


def _python_form(text: str, file: str) -> str:
    """Scripts that make a Trainer hold its plan."""
    from simulator.formats.readers.plans.trainer_script import CALLS

    if CALLS.search(text):
        return "transformers"
    raise PlanError(is_python(file))


def _detect_json(text: str, file: str) -> str:
    data = _quietly(json.loads, text)
    keys = set(data) if isinstance(data, dict) else set()
    if keys >= {"plans", "inputs", "counts"}:
        return "search"
    if "peft_type" in keys:
        raise PlanError.at(file, "is peft's adapter_config.json, which holds no plan", f"--recipe {file}")
    tuning = next((form for form, own in _TUNING.items() if keys & own), None)
    # whose reader says what is wrong
    return tuning or ("torchtitan" if keys & _TORCHTITAN and not keys & _DEEPSPEED else "deepspeed")


def _quietly(load: Any, text: str) -> object:  # noqa: ANN401  json.loads or tomllib.loads
    try:
        return load(text)
    except (ValueError, RecursionError):
        return None


def _json(path: Path) -> Mapping[str, Any]:
    text_of(path)
    data = read_json(path, PlanError)
    if not isinstance(data, dict):
        raise PlanError.at(str(path), "holds no object", '{"key": value}')
    return data


def _template(text: str, path: Path, define: Mapping[str, str]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """DeepSpeed's file, which may have comments (it is read as HJSON) or be a template that a script fills in; notes."""
    plain, placeholders = strict(text, define)
    data = parse_json(plain, path, PlanError)
    if not isinstance(data, dict):
        raise PlanError.at(str(path), "holds no object", '{"key": value}')
    note = (
        f"{path}: placeholders of a template, taken as auto: {', '.join(placeholders)}; --define NAME=VALUE gives one"
    )
    return data, (note,) if placeholders else ()


def _located(folder: Path, name: str) -> Path:
    """A file by the path that another file gives: from its folder or one above, or by its name alone."""
    above = [up / name for up in list(folder.absolute().parents)[:_FOLDERS_ABOVE]]
    paths = (folder / name, *above, folder / Path(name).name)
    return next((path for path in paths if path.is_file()), paths[0])


def _beside(folder: Path, name: str) -> Mapping[str, Any]:
    """A DeepSpeed file by the path that another file gives."""
    path = _located(folder, name)
    return _template(text_of(path), path, {})[0]


def _toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except (ValueError, RecursionError) as exc:
        raise PlanError.at(str(path), f"not TOML: {exc}") from None


def _own(data: dict[str, Any], path: Path) -> Draft:
    """Our own plan: a [plan] table of a study, or its fields alone."""
    table = data.get("plan", data)
    if not isinstance(table, dict):
        raise PlanError.at(f"{path}: plan", "is not a table", "[plan]")
    fields = Plan.flattened(table)
    model, cluster = (data.get(name) if "plan" in data else None for name in ("model", "cluster"))
    stated = {"dp_shard", "dp_replicate"} & set(fields)
    for degree in ("dp_shard", "dp_replicate"):
        if stated:
            fields.setdefault(degree, 1)
    return Draft(
        format="toml",
        software="shardwise",
        file=str(path),
        fields=fields,
        places={name: f"{path}: {'plan.' if 'plan' in data else ''}{Plan.spelled(name, table)}" for name in fields},
        leftover=None if stated else "dp_replicate" if fields.get("zero") == 0 else "dp_shard",
        model=model if isinstance(model, str) else None,
        cluster=cluster if isinstance(cluster, str) else None,
        stack=str(fields.get("stack", Plan.flat_fields()["stack"].default)),
        stack_why="the plan's own" if "stack" in fields else "the default",
        notes=Plan.moved_note(str(path), table, "plan." if "plan" in data else ""),
    )


# JSON as people keep it: comments, commas before a closing bracket, and the placeholders of a template
_TOKEN: Final = re.compile(
    r"""(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<comment>//[^\n]*|/\*.*?\*/|\#[^\n]*)|(?P<comma>,)(?=(?:\s|//[^\n]*|/\*.*?\*/|\#[^\n]*)*[\]}])
    |(?P<word>\$\{?[A-Za-z_]\w*\}?|<[A-Za-z][\w .-]*>|(?<![\w.+-])[A-Za-z_]\w*)""",
    re.DOTALL | re.VERBOSE,
)
_KNOWN: Final = {"true", "false", "null", "NaN", "Infinity"}
OPENS: Final = re.compile(r"(?:\s|//[^\n]*\n|/\*.*?\*/)*\{", re.DOTALL)  # a file that holds an object


def strict(text: str, define: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """The text as JSON has it, and its placeholders: words outside quotes. What `define` does not give is "auto"."""
    found: list[str] = []

    def one(match: re.Match[str]) -> str:
        if match["comment"] or match["comma"]:
            return " " * len(match.group())
        word = match["word"]
        if word is None or word in _KNOWN:
            return match.group()
        name = word.strip("${}<>")
        if name in define:
            return define[name] if _is_plain(define[name]) else json.dumps(define[name])
        found.append(name)
        return json.dumps(AUTO)

    return _TOKEN.sub(one, text), tuple(dict.fromkeys(found))


def _is_plain(value: str) -> bool:
    return re.fullmatch(r"true|false|null|-?\d[\d.]*(?:[eE][+-]?\d+)?", value) is not None
