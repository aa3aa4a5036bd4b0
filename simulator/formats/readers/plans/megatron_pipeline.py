"""Megatron-LM's arguments on the layers of pipeline stages, and on recomputation per stage."""

from __future__ import annotations

import re
from typing import Any, Final

from simulator.formats.readers.plans.reading import Reading

_CHUNKS: Final = (
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout",
)
_MAX_LAYOUT: Final = 100_000


def read_pipeline(r: Reading, fields: dict[str, Any]) -> None:
    """Virtual stages, uneven stages, layouts, and layers recomputed of each; faults go to `r`."""
    stages, layers = int(fields.get("pp", 1)), r.integer("--num-layers")
    given = [name for name in _CHUNKS if name in r]
    for name in given[1:]:
        r.fault(name, f"contradicts {given[0]}", "keep one")
    if given and stages == 1 and "pp" not in r.given:
        problem = "makes virtual stages, and the pipeline has one stage"
        r.fault(given[0], problem, "drop it, or --pipeline-model-parallel-size 2 or more")
    by_deepspeed = (r.text("--pp-partition-method") or "").strip("'\"")  # Megatron-DeepSpeed: what counts as a layer
    embedding = bool(r.flag("--account-for-embedding-in-pipeline-split")) or "embedding" in by_deepspeed
    loss = bool(r.flag("--account-for-loss-in-pipeline-split")) or "embedding" in by_deepspeed
    first = r.integer("--decoder-first-pipeline-num-layers")
    last = r.integer("--decoder-last-pipeline-num-layers")
    ends = {name: True for name, counts in (("embedding_as_layer", embedding), ("head_as_layer", loss)) if counts}
    if layers is None:
        _without_layers(r, fields, ends if stages > 1 else {}, first, last)
        return
    counted = layers + embedding + loss
    chunks = _chunks(r, stages, counted)
    if first is not None or last is not None:
        fields |= {
            k: v for k, v in (("first_stage_layers", first), ("last_stage_layers", last)) if v is not None
        } | ends
    elif (
        counted % stages
        and "stage_layers" not in fields
        and not {"--pipeline-model-parallel-layout", "--deepspeed"} & set(r.entries)
    ):
        below = counted // stages * stages - embedding - loss
        words = " and ".join(word for word, counts in (("embedding", embedding), ("loss", loss)) if counts)
        problem = f"{layers} layers{f' with {words}' if words else ''} do not divide by {stages} stages"
        remedy = f"{below} or {below + stages} layers, or a --pipeline-model-parallel-layout"
        r.fault("--num-layers", problem, remedy, (("--define", f"--num-layers={below or below + stages}"),))
    elif (embedding or loss) and stages > 1:
        fields |= ends
    _layout(r, fields, stages, layers)
    if chunks > 1:
        fields["virtual_stages"] = chunks
    _recomputed_layers(r, fields, layers, stages)


def _without_layers(
    r: Reading, fields: dict[str, Any], ends: dict[str, bool], first: int | None, last: int | None
) -> None:
    """Settings that do not need the number of layers (the model given beside the file has it)."""
    count = r.integer("--num-virtual-stages-per-pipeline-rank")
    found = {"virtual_stages": count, "first_stage_layers": first, "last_stage_layers": last}
    fields |= {name: value for name, value in found.items() if value is not None} | ends
    for name in ("--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-layout"):
        if r.raw(name) is not None:
            r.fault(name, "counts layers, and the file does not say how many there are", "add --num-layers N")


def _chunks(r: Reading, stages: int, layers: int) -> int:
    """Chunks of layers a stage."""
    stated = r.integer("--num-virtual-stages-per-pipeline-rank")
    each = r.integer("--num-layers-per-virtual-pipeline-stage")
    if stated is not None:
        return stated
    if each is None:
        return 1
    per_stage = layers // stages
    if per_stage % each:
        divisors = [d for d in range(1, per_stage + 1) if per_stage % d == 0]
        near = min(divisors, key=lambda d: (abs(d - each), d))
        problem = f"{each} does not divide the {per_stage} layers of a stage"
        r.fault("--num-layers-per-virtual-pipeline-stage", problem, str(near))
        return 1
    return per_stage // each


def _layout(r: Reading, fields: dict[str, Any], stages: int, layers: int) -> None:
    """`Et*3|(tt|)*29,m|L`: stages between bars, E embedding, t a layer, m a layer of multi-token prediction, L the loss."""
    name = "--pipeline-model-parallel-layout"
    text = r.text(name)
    if text is None:
        return
    flat = _repeated(text.replace(",", "").replace(" ", ""))
    if flat is None or re.fullmatch(r"[EtmL|]+", flat) is None:
        r.fault(name, f"{text!r} is not a layout", "stages of E, t, m, L between |, as Ettt|tttt|tttL")
        return
    if "m" in flat:
        r.unmodelled(name, "layers of multi-token prediction")
    counts = tuple(part.count("t") for part in flat.split("|"))
    if sum(counts) != layers or len(counts) % stages:
        problem = f"has {sum(counts)} layers in {len(counts)} parts, for {layers} layers and {stages} stages"
        r.fault(name, problem, "parts in a multiple of the stages, holding every layer")
        return
    fields["stage_layers"] = counts
    if len(counts) > stages:
        fields["virtual_stages"] = len(counts) // stages


def _repeated(text: str) -> str | None:
    """`(…)*n` and `x*n` written out; None beyond what a model can have."""
    pattern = re.compile(r"\(([^()]*)\)(?:\*(\d{1,5}))?|([^()*])\*(\d{1,5})")
    while found := pattern.search(text):
        layers, times = found.group(1) or found.group(3) or "", int(found.group(2) or found.group(4) or 1)
        if len(text) + len(layers) * times > _MAX_LAYOUT:
            return None
        text = text[: found.start()] + layers * times + text[found.end() :]
    return text


def _recomputed_layers(r: Reading, fields: dict[str, Any], layers: int, stages: int) -> None:
    """uniform: checkpoints of so many layers; block: the first so many layers of each (virtual) stage."""
    count = r.integer("--recompute-num-layers")
    method = str(r.raw("--recompute-method") or "")
    if fields.get("recompute") != "full" or count is None:
        if fields.get("recompute") == "full" and method == "block":
            r.fault("--recompute-method", "block needs --recompute-num-layers", "--recompute-num-layers N")
        return
    if method == "uniform":
        if count > 1:
            r.unmodelled("--recompute-num-layers", "a checkpoint a layer is taken, not one of several")
        return
    per_chunk = max(layers // (stages * int(fields.get("virtual_stages", 1))), 1)
    if count >= per_chunk:
        return
    every = max(round(per_chunk / count), 2)
    fields |= {"recompute": "every_k", "recompute_every": every}
    note = f"the first {count} of {per_chunk} layers: taken as each {every}th"
    r.unmodelled("--recompute-num-layers", note)
