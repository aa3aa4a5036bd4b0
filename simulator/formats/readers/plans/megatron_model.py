"""The model that Megatron-LM's arguments describe: GPT's shape unless they say Llama's, piece by piece."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from simulator.base.errors import Fault, InputError, ModelError
from simulator.base.units import whole
from simulator.formats.readers.plans.megatron_hybrid import read_hybrid
from simulator.formats.readers.plans.options import megatron_arguments, table_of
from simulator.formats.readers.plans.reading import Reading
from simulator.parallel.legality.degrees import nearest_divisor
from simulator.spec.model import Model

_MULTIPLE: Final = 128  # --make-vocab-size-divisible-by
_WINDOW: Final = re.compile(r"\(?(\d{1,18}),[01]\)?")
_ANY_MODEL: Final = (("--model", "gpt2"),)  # a preset that a ready command shows
_NEEDED: Final = ("--num-layers", "--hidden-size", "--num-attention-heads")


def read_model(r: Reading, plan: dict[str, Any]) -> Model | None:
    """The model, None where the arguments do not state its size at all; faults go to `r`."""
    before = len(r.faults)
    sizes = {name: r.integer(name) for name in _NEEDED}
    if "--decoder-num-layers" in r and "model" not in r.given:
        problem = "an encoder and a decoder beside each other are not modelled"
        r.fault("--decoder-num-layers", problem, "--model with a decoder of its size", _ANY_MODEL)
        r.raw("--decoder-num-layers")
        return None
    if "model" in r.given or not any(name in r for name in _NEEDED):
        for name in megatron_arguments().model:
            r.raw(name)
        return None
    for name in _NEEDED:
        if name not in r:
            r.fault(name, "is required and missing", f"{name} N, or --model", _ANY_MODEL)
    layers, width, heads = (sizes[name] for name in _NEEDED)
    data: dict[str, Any] = {"name": "megatron", "num_layers": layers, "d_model": width, "num_heads": heads}
    _attention(r, data)
    _mlp(r, data, width)
    _rest(r, data, plan)
    _experts(r, data)
    _latent(r, data)
    read_hybrid(r, data, plan)
    if data.pop("mtp_repeated") and data.get("mtp_layers"):
        data |= {"mtp_passes": data["mtp_layers"], "mtp_layers": 1}
    vocabulary = _vocabulary(r, plan)
    if None in sizes.values() or vocabulary is None or len(r.faults) > before:
        counts = {"tp": (heads, "heads"), "ep": (data.get("experts", {}).get("num_experts"), "experts")}
        _indivisible(r, plan, counts)
        return None
    data["vocab_size"] = vocabulary
    try:
        return Model.parse(data, r.file, ModelError)
    except InputError as exc:
        r.faults += exc.faults
        return None


_DEGREES: Final = {"tp": "--tensor-model-parallel-size", "ep": "--expert-model-parallel-size"}


def _indivisible(r: Reading, plan: Mapping[str, Any], counts: Mapping[str, tuple[int | None, str]]) -> None:
    """Sizes that the degrees do not divide, if the model cannot be built (otherwise the mesh reports them)."""
    for degree, (count, noun) in counts.items():
        parts = plan.get(degree, 1)
        if count and count % parts and degree not in r.given:
            problem = f"{parts} does not divide the model's {count} {noun}"
            near = nearest_divisor(count, parts)
            r.fault(_DEGREES[degree], problem, f"{near}", (("--define", f"{_DEGREES[degree]}={near}"),))


def _attention(r: Reading, data: dict[str, Any]) -> None:
    grouped, groups = bool(r.flag("--group-query-attention")), r.integer("--num-query-groups")
    if grouped:
        data["num_kv_heads"] = groups or 1
    elif groups is not None and groups > 1:
        r.fault("--num-query-groups", "has no effect without --group-query-attention", "add --group-query-attention")
    channels = r.integer("--kv-channels")
    if channels is not None:
        data["head_dim"] = channels
    data["fused_qkv"] = True
    if r.flag("--qk-layernorm"):
        data["qk_norm"] = True
    _windows(r, data)
    bias = not r.flag("--disable-bias-linear")
    data |= {"out_bias": bias, "mlp_bias": bias, "qkv_bias": bool(r.flag("--add-qkv-bias")) or bias}


def _windows(r: Reading, data: dict[str, Any]) -> None:
    """Keys that a token sees (`--window-size 127,0`: its own and 127 before), and the sink of each head's softmax."""
    size, every = r.text("--window-size"), r.integer("--window-attn-skip-freq", least=0)
    found = _WINDOW.fullmatch(size.replace(" ", "")) if size is not None else None
    if size is not None and found is None:
        r.fault("--window-size", f"{size!r} is not a window of past keys", "--window-size 127,0")
    if found is not None:
        data |= {"sliding_window": int(found[1]) + 1, "global_every": every or 0}
    kind = r.choice("--softmax-type", ("vanilla", "off-by-one", "learnable"))
    data["attention_sinks"] = kind == "learnable"


def _mlp(r: Reading, data: dict[str, Any], width: int | None) -> None:
    quick = bool(r.flag("--quick-geglu"))  # x times its sigmoid, gated: what SwiGLU computes, but for a factor
    gated, squared = bool(r.flag("--swiglu")) or quick, bool(r.flag("--squared-relu"))
    r.number("--glu-linear-offset")
    clamp = r.number("--activation-func-clamp-value")
    data |= {"gate_clamp": clamp} if clamp else {}
    r.flag("--openai-gelu")
    if gated and squared:
        r.fault("--squared-relu", "contradicts --swiglu", "keep one")
    data["mlp"] = "swiglu" if gated else "squared_relu" if squared else "gelu_tanh"
    stated = r.integer("--ffn-hidden-size")
    if stated is None and width is not None:
        # 4 h; gated, two thirds of it, down to a multiple of 64 (arguments.py)
        stated = int((4 * width * 2 / 3) / 64) * 64 if gated else 4 * width
    data["d_ff"] = stated


def _rest(r: Reading, data: dict[str, Any], plan: dict[str, Any]) -> None:
    rms = r.choice("--normalization", ("LayerNorm", "RMSNorm")) == "RMSNorm"
    data |= {"norm": "rms" if rms else "layer", "norm_bias": not rms, "family": "llama" if rms else "gpt3"}
    words = ("learned_absolute", "rope", "none", "mrope", "relative", "alibi")
    positions = r.choice("--position-embedding-type", words) or "learned_absolute"
    if r.flag("--use-rotary-position-embeddings"):
        positions = "rope"
    if positions in ("alibi", "relative"):
        r.unmodelled("--position-embedding-type", f"{positions}: a bias inside attention costs nothing here")
    data["positions"] = {"learned_absolute": "learned", "rope": "rope", "mrope": "rope"}.get(positions, "none")
    if (share := r.number("--rotary-percent")) is not None:
        data["rotary_fraction"] = share
    r.flag("--rotary-interleaved")
    r.choice("--rope-type", ("rope", "yarn"))
    longest = r.integer("--max-position-embeddings")
    if longest is not None and plan.get("seq_len", 0) > longest:
        problem = f"is {longest}, and --seq-length {plan['seq_len']}"
        r.fault("--max-position-embeddings", problem, f"--max-position-embeddings {plan['seq_len']}")
    data["max_positions"] = longest or plan.get("seq_len", 1)
    data["tied_embeddings"] = not r.flag("--untie-embeddings-and-output-weights")


def _experts(r: Reading, data: dict[str, Any]) -> None:
    """Routed and shared experts, and the layers that have them."""
    count, top = r.integer("--num-experts", least=0), r.integer("--moe-router-topk")
    width, shared = r.integer("--moe-ffn-hidden-size"), r.integer("--moe-shared-expert-intermediate-size", least=0)
    latent = r.integer("--moe-latent-size")
    score = r.choice("--moe-router-score-function", ("softmax", "sigmoid"))
    dtype = r.choice("--moe-router-dtype", ("fp32", "fp64"))
    # --expert-interval is 2 and --topk 1 unless given, and the gate is in fp32 (TopKGate)
    deepspeed = "--deepspeed" in r
    frequency = r.text("--moe-layer-freq") or ("2" if deepspeed else "1")
    further = r.integer("--mtp-num-layers", least=0)
    if further:
        data["mtp_layers"] = further
    data["mtp_repeated"] = bool(r.flag("--mtp-use-repeated-layer"))
    if not count:
        return
    found: dict[str, Any] = {
        "num_experts": count,
        "top_k": top or (1 if deepspeed else 2),
        "d_ff": width or data["d_ff"] or 0,
    }
    found |= {"shared_d_ff": shared} if shared else {}
    found |= {"latent_dim": latent} if latent else {}
    found |= {"score": score} if score else {}
    found["router_dtype"] = "fp32" if dtype or deepspeed else "bf16"
    dense = _dense_layers(frequency, data["num_layers"])
    if dense is None:
        problem = f"{frequency!r}: layers with experts are taken to begin once and come at one distance"
        r.fault("--moe-layer-freq", problem, "a number, or ([0]*3+[1]*58)")
    else:
        found["first_dense_layers"], found["every"] = dense
    data["experts"] = found


def _dense_layers(text: str, layers: int | None) -> tuple[int, int] | None:
    """(layers before the first with experts, their distance) of a number or a list such as `([0]*3+[1]*58)`."""
    if number := whole(text):
        return 0, number
    flat = "".join(text.split()).strip("()")
    parts = re.findall(r"(?:^|\+)\[([01](?:,[01])*)\](?:\*(\d{1,5}))?(?=\+|$)", flat)
    marks = [mark for part, times in parts for mark in part.split(",") * int(times or 1)]
    ones = [place for place, mark in enumerate(marks) if mark == "1"]
    if len(marks) != layers or not ones:
        return None
    every = ones[1] - ones[0] if len(ones) > 1 else 1
    return (ones[0], every) if ones == list(range(ones[0], len(marks), every)) else None


def _latent(r: Reading, data: dict[str, Any]) -> None:
    """Multi-head latent attention; its defaults are arguments.py's."""
    on = bool(r.flag("--multi-latent-attention"))
    queries, keys = r.integer("--q-lora-rank"), r.integer("--kv-lora-rank") or 32
    plain, turned = r.integer("--qk-head-dim") or 128, r.integer("--qk-pos-emb-head-dim") or 64
    values = r.integer("--v-head-dim") or 128
    if not on:
        return
    for name in ("num_kv_heads", "head_dim", "fused_qkv", "qk_norm", "qkv_bias", "out_bias"):
        data.pop(name, None)
    data["latent"] = {
        "q_lora_rank": queries or 0,
        "kv_lora_rank": keys,
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": turned,
        "v_head_dim": values,
    }


def _vocabulary(r: Reading, plan: dict[str, Any]) -> int | None:
    """Rows of the embedding: padded to a multiple of 128 × tp unless --padded-vocab-size says how many there are."""
    padded, stated = r.integer("--padded-vocab-size"), r.integer("--vocab-size")
    unit = (r.integer("--make-vocab-size-divisible-by") or _MULTIPLE) * int(plan.get("tp", 1))
    tokenizer = r.text("--tokenizer-type")
    if padded is not None or (stated is None and {"--padded-vocab-size", "--vocab-size"} & set(r.entries)):
        return padded  # or a fault that is told
    merges = "--merge-file" in r  # only byte-pair encoding of GPT-2's kind has one
    known = table_of("megatron")["tokenizers"]
    if stated is None and (tokenizer in known or (tokenizer is None and merges)):
        stated = int(known[tokenizer or "GPT2BPETokenizer"])
        r.note("--tokenizer-type" if tokenizer else "--merge-file", f"{stated} tokens")
    if stated is None:
        problem = f"the size of the vocabulary is only in the tokenizer's files ({tokenizer or 'no --tokenizer-type'})"
        remedy = "--vocab-size N in the file, --define=--vocab-size=N, or --model"
        cure = (("--define", f"--vocab-size={table_of('megatron')['examples']['vocab-size']}"),)
        r.faults.append(Fault(place=r.place("--vocab-size"), problem=problem, remedy=remedy, flags=cure))
        return None
    if tokenizer == "NullTokenizer":
        stated += 1  # the end of a document
    return -(-stated // unit) * unit
