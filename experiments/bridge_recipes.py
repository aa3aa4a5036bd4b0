"""Recipes of Megatron-Bridge as plain settings, read in its source and not run: what `--recipe NAME` starts from.

Reads a clone of github.com/NVIDIA-NeMo/Megatron-Bridge by `git show` and writes
simulator/formats/readers/plans/tables/megatron-bridge-recipes.toml, one line a recipe: the settings of its ConfigContainer that a
plan has a word for, of models that are presets here. `python experiments/bridge_recipes.py CLONE [COMMIT]`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simulator.spec.model.families import presets_of

OUT = Path(__file__).resolve().parents[1] / "simulator/formats/readers/plans/tables/megatron-bridge-recipes.toml"
FOLDER = "src/megatron/bridge/recipes"
KEPT = {
    "model": (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size",
        "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "recompute_granularity", "recompute_method",
        "recompute_num_layers", "recompute_modules", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "attention_backend",
        "cuda_graph_impl", "cuda_graph_scope", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "seq_length",
        "moe_grouped_gemm", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "cpu_offloading",
    ),
    "train": ("global_batch_size", "micro_batch_size"),
    "dataset": ("seq_length",),
    "optimizer": (
        "use_distributed_optimizer", "use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
    ),
    "ddp": (
        "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32", "use_megatron_fsdp",
        "data_parallel_sharding_strategy",
    ),
    "comm_overlap": ("tp_comm_overlap",),
    "peft": ("dim", "target_modules", "dropout"),
}  # fmt: skip


class Clone:
    """Files of one commit. functions: of every file that was read, by name."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder, self.commit = folder, commit
        self.functions: dict[str, ast.FunctionDef] = {}

    def git(self, *words: str) -> str:
        command = ["git", "-C", str(self.folder), *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
        return done.stdout

    def tree(self, path: str) -> ast.Module:
        return ast.parse(self.git("show", f"{self.commit}:{path}"))

    def read(self, path: str) -> list[str]:
        found = [node for node in self.tree(path).body if isinstance(node, ast.FunctionDef)]
        self.functions |= {node.name: node for node in found}
        return [node.name for node in found if node.name.endswith("_config") and not node.name.startswith("_")]


class Recipe:
    """One function's settings, as its statements set them, with adapters by LoRA."""

    def __init__(self, clone: Clone) -> None:
        self.clone, self.names = clone, dict[str, Any]()
        self.config: dict[str, Any] = {}

    def run(self, name: str, **arguments: object) -> dict[str, Any]:
        node = self.clone.functions[name]
        defaults = zip(node.args.args[len(node.args.args) - len(node.args.defaults) :], node.args.defaults, strict=True)
        self.names = {one.arg: self.value(default) for one, default in defaults} | arguments
        for statement in node.body:
            self.take(statement)
        return self.config

    def take(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id="cfg")], value=ast.Call() as call):
                self.config = self.begin(call)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.names[name] = self.value(value)
            case ast.Assign(targets=[ast.Attribute() as target], value=value):
                self.put(ast.unparse(target).split("."), self.value(value))
            case ast.If(test=test) if "lora" in ast.unparse(test):  # of both kinds of adapters, or of LoRA
                for one in node.body:
                    self.take(one)
            case ast.Return(value=ast.Call() as call):
                self.config = self.begin(call)

    def put(self, path: list[str], value: object) -> None:
        path = ["cfg", "peft", *path[1:]] if path[0] == "peft_cfg" else path
        if path[0] != "cfg" or value is UNKNOWN:
            return
        table = self.config
        for part in path[1:-1]:
            inner = table.get(part)
            table = table.setdefault(part, {}) if isinstance(inner, dict) or inner is None else {}
        table[path[-1]] = value

    def begin(self, call: ast.Call) -> dict[str, Any]:
        name = ast.unparse(call.func)
        if name == "ConfigContainer":
            found = {one.arg: self.value(one.value) for one in call.keywords if one.arg}
            return {key: value for key, value in found.items() if value is not UNKNOWN and value is not None}
        if name not in self.clone.functions:
            return {}
        node = self.clone.functions[name]
        given = dict(zip([one.arg for one in node.args.args], map(self.value, call.args), strict=False))
        return Recipe(self.clone).run(
            name, **given, **{one.arg: self.value(one.value) for one in call.keywords if one.arg}
        )

    def value(self, node: ast.expr) -> Any:  # noqa: ANN401, PLR0911  plain data of each kind
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.names.get(name, UNKNOWN)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self.value(one) for one in parts]
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr):
                return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(attr, UNKNOWN)
            case ast.Attribute() if ast.unparse(node).startswith("AttnBackend."):
                return node.attr
            case ast.Call(func=ast.Attribute(value=ast.Call(args=[one, *_]) as inner)) if (
                "from_hf_pretrained" in ast.unparse(inner.func)
            ):
                return {"hf_path": self.value(one)}
            case ast.Call(func=ast.Name(id="default_peft_config")):
                return {
                    "dim": 32,
                    "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
                    "dropout": 0.0,
                }
            case ast.Call(keywords=words) if words:
                return {one.arg: self.value(one.value) for one in words if one.arg}
        return UNKNOWN


UNKNOWN = object()


def recipes(clone: Clone) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, model's public name, settings) of every recipe of a preset."""
    clone.read(f"{FOLDER}/common.py")
    paths = clone.git("ls-tree", "-r", "--name-only", clone.commit, FOLDER).split()
    names = [
        name
        for path in paths
        if path.count("/") == 6 and "/h100/" in path and "_vl" not in path
        for name in clone.read(path)
    ]
    for name in sorted(names):
        config = Recipe(clone).run(name)
        model = config.get("model")
        path = model.get("hf_path") if isinstance(model, dict) else None
        if isinstance(path, str) and presets_of(path):
            yield name, path, config


def aliases(clone: Clone) -> dict[str, str]:
    """Names of older releases."""
    paths = clone.git("ls-tree", "-r", "--name-only", clone.commit, FOLDER).split()
    trees = [clone.tree(path) for path in paths if path.endswith(".py") and path.count("/") == 5]
    found = [one for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names]
    return {one.asname: one.name for one in found if one.asname and one.asname.endswith("_config")}


def line(config: dict[str, Any], path: str) -> str:
    """A recipe as a table of TOML on one line."""
    parts = [
        f'model.hf_path = "{path}"',
        f'mixed_precision = "{config["mixed_precision"]}"' if isinstance(config.get("mixed_precision"), str) else "",
    ]
    for table, keys in KEPT.items():
        settings = config.get(table)
        if not isinstance(settings, dict):
            continue
        for key in keys:
            value = settings.get(key)
            if value is not None and value is not UNKNOWN and value != {} and not usual(key, value, settings):
                parts.append(f"{table}.{key} = {written(value)}")
    return "{ " + ", ".join(filter(None, parts)) + " }"


def usual(key: str, value: object, settings: dict[str, Any]) -> bool:
    """What the ConfigContainer has without being told, or what another setting switches off."""
    if key.startswith("cuda_graph"):
        return settings.get("cuda_graph_impl") in (None, "none")
    if key.endswith("_dtype"):
        return not settings.get("use_precision_aware_optimizer")
    if key == "moe_flex_dispatcher_backend":
        return settings.get("moe_token_dispatcher_type") != "flex"
    return (key.endswith("_size") and value == 1 and "batch" not in key) or (
        value is False and key in ("sequence_parallel", "use_megatron_fsdp", "use_precision_aware_optimizer")
    )


def written(value: object) -> str:
    """A value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def main() -> None:
    """Write the table."""
    clone = Clone(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "HEAD")
    commit = clone.git("rev-parse", clone.commit).strip()
    found = list(recipes(clone))
    known = {name for name, _, _ in found}
    lines = [
        f"# Recipes of NVIDIA-NeMo/Megatron-Bridge@{commit[:12]}, src/megatron/bridge/recipes: written by experiments/bridge_recipes.py",
        "[recipes]",
        *(f"{name} = {line(config, path)}" for name, path, config in found),
        "",
        "# Names of older releases",
        "[aliases]",
        *(f'{old} = "{new}"' for old, new in sorted(aliases(clone).items()) if new in known),
    ]
    OUT.write_text("\n".join(lines) + "\n")
    print(len(found), "recipes")


if __name__ == "__main__":
    main()
