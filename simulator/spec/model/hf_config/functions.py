"""Functions that the families' expressions may call. A value that one cannot take is a `WrongValueError`."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import contains
from typing import Any, Final

from simulator.spec.model.hf_config.families import key_facts


class WrongValueError(Exception):
    """A key's value that cannot be taken, and what would be right."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


def short(value: object) -> str:
    """The value as a message shows it."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _word(words: str, value: object) -> str:
    table = key_facts()[words]
    if isinstance(value, str) and value in table:
        return str(table[value])
    raise WrongValueError(f"activation {short(value)} is not known", f"one of {', '.join(table)}")


def _one_of(value: object, *legal: str) -> object:
    if value in legal:
        return value
    raise WrongValueError(f"{short(value)} is not known", f"one of {', '.join(legal)}")


def _every(layers: object, word: object, default: int) -> int:
    """n, where each n-th layer is a `word`; 0: none is. Irregular lists: as many at equal distances."""
    if layers is None:
        return default
    if not isinstance(layers, list):
        raise WrongValueError(f"{short(layers)} is not a list", "a word for each layer")
    count = layers.count(word)
    if not count:
        return 0
    first = layers.index(word) + 1
    return first if len(layers) // first == count else round(len(layers) / count)


def _leading(layers: object) -> int:
    """How many layers a list names, which are the first."""
    if layers is None or layers == []:
        return 0
    if isinstance(layers, list) and layers == list(range(len(layers))):
        return len(layers)
    raise WrongValueError("single layers without experts are not modelled", "[], or the first layers")


def _letters_of(layers: object, default: str = "") -> str:
    """A pattern, or a list of words, as Model's letters."""
    if layers is None and default:
        return default
    if isinstance(layers, str) and layers:
        return layers
    words = key_facts()["letters"]
    if isinstance(layers, list) and layers and all(str(word) in words for word in layers):
        return "".join(words[str(word)] for word in layers)
    known = ", ".join(word for word in words if word.isidentifier())
    problem = "is missing" if layers is None else f"{short(layers)} is not a pattern of layers"
    raise WrongValueError(problem, f"letters M * - E, or a list of {known}")


def _every_nth(count: int, period: int, offset: int, there: str, elsewhere: str) -> str:
    return "".join(there if number % period == offset % period else elsewhere for number in range(count))


def _placed(count: int, layers: object, there: str, elsewhere: str, first: int = 0) -> str:
    """A letter a layer: `there` for those that a list numbers, from `first` on."""
    if layers is not None and not (isinstance(layers, list) and all(isinstance(n, int) for n in layers)):
        raise WrongValueError(f"{short(layers)} is not a list of layers", "their numbers")
    named = frozenset(layers or ())
    return "".join(there if number + first in named else elsewhere for number in range(count))


def _joined(first: str, second: str) -> str:
    """Each layer's first branch, then its second."""
    if len(first) != len(second):
        raise WrongValueError(f"{len(first)} entries for {len(second)} layers", f"{len(second)} entries")
    return "".join(a + b for a, b in zip(first, second, strict=True))


def _first(value: object) -> int:
    """A count that may be a list of one for each layer, all the same; 0 where there is none."""
    counts = [0] if value is None else value if isinstance(value, list) else [value]
    if not counts or isinstance(counts[0], bool) or not isinstance(counts[0], int) or len(set(map(str, counts))) > 1:
        raise WrongValueError(f"{short(value)} is not the same count for all layers", "a positive integer")
    return counts[0]


def _yarn_factor(scaling: object, default: float) -> float:
    """What scales rotated queries and keys where positions are stretched (arXiv 2309.00071, section 3.4).

    default: the stretch of a file that says nothing of it.
    """
    table = scaling if isinstance(scaling, dict) else {}
    if table and (table.get("rope_type") or table.get("type")) not in (None, "yarn"):
        return 1.0
    stretched, factor = table.get("factor", default), table.get("attention_factor")
    if factor is None:
        factor = round(0.1 * math.log(max(stretched, 1.0)) + 1, 4) if isinstance(stretched, int | float) else 0
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise WrongValueError(f"{short(scaling)} has no factor above 0", "a number above 0")
    return float(factor)


def _blocks(configs: object, part: str) -> list[dict[str, Any]]:
    """The parts that are there of DeciLM's block_configs."""
    try:
        return [block[part] for block in configs if not block[part].get("no_op")]  # type: ignore[attr-defined]
    except (TypeError, KeyError, AttributeError):
        raise WrongValueError(f"{short(configs)} is not a list of blocks", "attention and ffn of each layer") from None


def _group_of(configs: object) -> int:
    groups = {block.get("n_heads_in_group") for block in _blocks(configs, "attention")}
    if len(groups) != 1 or not all(isinstance(group, int) and group > 0 for group in groups):
        raise WrongValueError("layers with different groups of heads are not modelled", "one n_heads_in_group")
    return int(groups.pop() or 1)


def _mean_width(configs: object, width: int) -> int:
    """Mean of the MLPs' widths: 2/3 of ffn_mult × hidden, up to the next multiple of 256 (modeling_decilm.py)."""
    written = [block.get("ffn_mult") for block in _blocks(configs, "ffn")]
    mults = [float(mult) for mult in written if isinstance(mult, int | float) and mult > 0]
    if not mults or len(mults) < len(written):
        raise WrongValueError("an MLP has no ffn_mult", "a number above 0")
    return round(sum(-(-int(2 * mult * width / 3) // 256) * 256 for mult in mults) / len(mults))


def _pattern_of(configs: object) -> str:
    _blocks(configs, "attention"), _blocks(configs, "ffn")
    words = (("attention", "*"), ("ffn", "-"))
    return "".join(letter for block in configs for part, letter in words if not block[part].get("no_op"))  # type: ignore[attr-defined]


def _classifies(architectures: object) -> bool:
    """The class that a file names reads one token and tells classes apart."""
    return isinstance(architectures, list) and str(architectures[:1]).endswith("ForSequenceClassification']")


def _zeros(layers: object) -> int:
    """Layers before the first with experts, of a list that has 1 for those."""
    if isinstance(layers, list) and 1 in layers and 0 not in layers[layers.index(1) :]:
        return layers.index(1)
    raise WrongValueError("single layers without experts are not modelled", "0 for the first layers, then 1")


def _in_tiles(sides: object, size: int) -> list[list[int]]:
    """Rows and columns of tiles of `size` pixels: of [height, width] that images are made to fit, or of one longest side."""
    if isinstance(sides, int) and not isinstance(sides, bool):
        return [[-(-sides // size)] * 2] if sides > size else []
    for pair in sides if isinstance(sides, list) and sides else [sides]:
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and all(isinstance(n, int) and n > 0 and not n % size for n in pair)
        ):
            raise WrongValueError(f"{short(pair)} is no [height, width] of whole tiles", f"multiples of {size} pixels")
    return [[height // size, width // size] for height, width in sides]  # type: ignore[attr-defined]


def _behind(value: object, word: str) -> int:
    """The number that follows a word."""
    number = value.removeprefix(word) if isinstance(value, str) and value.startswith(word) else ""
    if number.isdecimal() and number.isascii() and 0 < int(number[:6]) < 2**16:
        return int(number)
    raise WrongValueError(f"{short(value)} is not known", f"{word}9, or another number")


def _name_of(value: object) -> object:
    """DBRX' activation: {"name": "silu"}."""
    return value.get("name", "silu") if isinstance(value, dict) else value or "silu"


FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "gated": lambda value: _word("gated", value),
    "plain": lambda value: _word("plain", value),
    "one_of": _one_of,
    "every": _every,
    "leading": _leading,
    "letters_of": _letters_of,
    "every_nth": _every_nth,
    "placed": _placed,
    "joined": _joined,
    "first": _first,
    "yarn_factor": _yarn_factor,
    "group_of": _group_of,
    "mean_width": _mean_width,
    "pattern_of": _pattern_of,
    "name_of": _name_of,
    "in_tiles": _in_tiles,
    "behind": _behind,
    "has": contains,
    "zeros": _zeros,
    "classifies": _classifies,
    "max": max,
    "len": len,
    "int": int,
    "bool": bool,
    "round": round,
    "root": math.isqrt,
}
