"""Hybrids in Megatron-LM's arguments: the pattern of layers, and the shape of Mamba-2 mixers.

A pattern has a letter for each layer (core/ssm/mamba_hybrid_layer_allocation.py); newer releases part pipeline stages by |
and modules of multi-token prediction by /, and count layers in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from simulator.formats.readers.plans.reading import Entry, Reading

PATTERN_NAMES: Final = ("--hybrid-override-pattern", "--hybrid-layer-pattern")
_RATIOS: Final = ("--hybrid-attention-ratio", "--hybrid-mlp-ratio")
_SIZES: Final = ("--mamba-state-dim", "--mamba-head-dim", "--mamba-num-groups", "--mamba-num-heads")
_SPECS: Final = frozenset({"mamba_stack_spec", "hybrid_stack_spec"})  # before and after the module was renamed
_MODULES: Final = ("*E", "*-")  # what a module of multi-token prediction can be here: attention, then experts or an MLP
_EXPAND: Final = 2  # inner channels over the stream's, where no number of heads is given


def with_layers_counted(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The settings, with the number of layers that a pattern amounts to where nothing else says it."""
    found = next((entries[name] for name in PATTERN_NAMES if name in entries), None)
    if found is None or not isinstance(found.value, str) or "--num-layers" in entries:
        return entries
    count = len(_parts(found.value)[0])
    return {**entries, "--num-layers": Entry(name="--num-layers", value=str(count), place=found.place)}


def is_hybrid(entries: Mapping[str, Entry]) -> bool:
    """Some layer has no attention."""
    return any(name in entries for name in (*PATTERN_NAMES, *_RATIOS, "--is-hybrid-model"))


def read_hybrid(r: Reading, data: dict[str, Any], plan: dict[str, Any]) -> None:
    """Pattern and mixers into the model's fields, stages that the pattern parts into the plan's; faults go to `r`."""
    hybrid = is_hybrid(r.entries)
    given = [name for name in PATTERN_NAMES if name in r]
    texts = [r.text(name) for name in PATTERN_NAMES]
    sizes = {name: r.integer(name) for name in _SIZES}
    r.flag("--is-hybrid-model")
    module = r.text("--mtp-hybrid-override-pattern")
    ratios = [name for name in _RATIOS if (r.number(name) or 0) > 0]
    if not hybrid:
        return
    _spec(r)
    for name in given[1:]:
        r.fault(name, f"contradicts {given[0]}", "keep one")
    if not given:
        where = ratios[0] if ratios else "--is-hybrid-model"
        r.fault(where, "does not say which layer is what", "--hybrid-override-pattern, a letter for each layer")
        return
    text = next((text for text in texts if text is not None), None)
    if text is None:
        return  # it hangs on the script's environment, which `r` has told
    pattern, stages, modules = _parts(text)
    data["pattern"] = pattern
    modules += [module] * int(data.get("mtp_layers", 0)) if module is not None and not modules else []
    for one in sorted({*modules} - {*_MODULES}):
        problem = f"modules of multi-token prediction like {one!r} are not modelled"
        r.fault(given[0], problem, f"{' or '.join(_MODULES)} behind each /")
    if modules:
        data["mtp_layers"] = len(modules)
    if "M" in pattern:
        data["mamba"] = _mixers(r, sizes, data)
    if len(stages) > 1:
        plan["stage_layers"] = stages
        plan |= (
            {"virtual_stages": len(stages) // max(1, int(plan.get("pp", 1)))} if len(stages) > plan.get("pp", 1) else {}
        )


def _parts(text: str) -> tuple[str, tuple[int, ...], list[str]]:
    """(layers' letters, layers of each part between bars, modules of multi-token prediction) of a pattern."""
    main, *modules = text.split("/")
    parts = main.split("|")
    return "".join(parts), tuple(map(len, parts)), modules


def _mixers(r: Reading, sizes: Mapping[str, int | None], data: Mapping[str, Any]) -> dict[str, int]:
    """The mixers' shape; what is not stated is arguments.py's."""
    head, groups = sizes["--mamba-head-dim"] or 64, sizes["--mamba-num-groups"] or 8
    heads, width = sizes["--mamba-num-heads"], data.get("d_model") or 0
    if heads is None and _EXPAND * width % head:
        problem = f"{head} does not divide {_EXPAND} × {width} inner channels"
        r.fault("--mamba-head-dim", problem, "--mamba-num-heads N, or a divisor")
    return {
        "num_heads": heads or max(1, _EXPAND * width // head),
        "head_dim": head,
        "num_groups": groups,
        "state_dim": sizes["--mamba-state-dim"] or 128,
    }


def _spec(r: Reading) -> None:
    """--spec names the layers of a pattern; any other value is reported as not modelled."""
    entry = r.entries.get("--spec")
    value = entry.value if entry is not None else None
    words = value if isinstance(value, list) else str(value).strip("[]").split()
    if _SPECS.intersection(words):
        r.raw("--spec")
