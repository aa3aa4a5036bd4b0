"""The noun `Model`: what a token costs, and where models come from.

Legend: D d_model, F d_ff, H heads, K kv heads, C head_dim, V vocabulary, L layers, s sequence length, E experts.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Final

from simulator.base.errors import ModelError
from simulator.spec.model.files import PRESETS, model_fields, preset_names, unknown_model
from simulator.spec.model.parameters import ModelParameters


class Model(ModelParameters, defer_build=False):
    """One stack of transformer layers. Its fields are those of `ModelFields`; its parameters and layers `ModelParameters`'.

    Required: name, num_layers, d_model, num_heads, d_ff, vocab_size. Defaults are those of Llama.
    """

    # -- FLOP ----------------------------------------------------------------------------------------------------

    def attention_pairs(self, seq_len: int, *, causal: bool = True) -> int:
        """(query, key) pairs of one head over all layers and one sequence.

        Causal counts half the square, s²/2, by convention (exactly s(s+1)/2); a window w < s leaves w s - w²/2, and w s - w²/4
        where half of it lies on either side.
        """
        square = seq_len * seq_len
        full = square // 2 if causal and not self.bidirectional else square
        if self.sliding_window is None or self.sliding_window >= seq_len:
            return self.num_attention_layers * full
        window = self.sliding_window
        band = window * seq_len - window * window // (4 if self.bidirectional else 2)
        num_global = self.num_layers // self.global_every if self.global_every else 0
        return num_global * full + (self.num_attention_layers - num_global) * band

    def model_flop_per_sequence(self, seq_len: int, *, causal: bool = True) -> int:
        """FLOP of one sequence, forward and backward, without recomputation: 6 N_matmul s + 12 H C pairs.

        6 FLOP a parameter and token: a multiply and an add, once forward and twice backward; the embedding lookup is
        free. Attention: two products forward (4 FLOP a pair and channel), twice that backward; where values have
        channels of their own number, 2 FLOP for each of theirs and 2 for each of the queries'. A Mamba-2 mixer's recurrence:
        4 I N a token, twice that backward. A tower: three times its forward.
        """
        matmul = 6 * (self.num_matmul_parameters * seq_len + self.numel_per_sequence)
        if self.mamba is not None:
            matmul += 3 * self.mamba.scan_flop_per_token * self.num_mixers * seq_len
        pairs = self.attention_pairs(seq_len, causal=causal)
        more = self.mtp_layers * self.mtp_passes * (seq_len * seq_len // 2 if causal else seq_len * seq_len)
        return matmul + 6 * (self.q_width + self.o_width) * (pairs + more) + 3 * self.tower_flop

    def model_flop_per_token(self, seq_len: int, *, causal: bool = True) -> int:
        """FLOP a token: 6 N_matmul + 12 L s H C, attention halved if causal (PaLM's appendix B counts it in full)."""
        return self.model_flop_per_sequence(seq_len, causal=causal) // seq_len

    # -- making one ----------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, name_or_path: str | Path, like: str | None = None) -> Model:
        """A preset by its name or a public one (`Qwen/Qwen3-32B`), or a model from a config.json, its folder, or a TOML file.

        like: the family of config.json files to read it as, whatever it says. Raises ModelError: with the nearest names if
        nothing is called so, with every fault of the file otherwise.
        """
        text = str(name_or_path)
        path = Path(text)
        if path.is_dir():
            path = path / "config.json"
        if like is not None and (text in preset_names() or path.suffix == ".toml"):
            problem = f"{text} is not a config.json, and its family is known"
            raise ModelError.at(f"--like {like}", problem, "leave it out")
        if text in preset_names():
            return _preset(text)
        if path.suffix == ".toml":
            return cls._from_toml(path)
        if path.suffix == ".json" or path.is_file():
            from simulator.spec.model.hf_config import file_fields

            fields, place = file_fields(path, like)
            return Model.parse(fields, place, ModelError)
        from simulator.spec.model.families import preset_of, presets_of

        preset = None if like else preset_of(text)
        if preset is None:
            raise ModelError(unknown_model(text, presets_of(text)))
        return _preset(preset)

    @staticmethod
    def _from_toml(path: Path) -> Model:
        return Model.parse(model_fields(path), str(path), ModelError)


_NO_SHAPE: Final = {"name", "family", "sources", "max_positions"}


def preset_with_shape(model: Model) -> str | None:
    """The preset whose layers are this model's, whatever its name, the nearest in name if there are several; None: none is."""
    rows = model.positions == "learned"  # a parameter of as many
    mine = model.model_dump(exclude=_NO_SHAPE - {"max_positions"} if rows else _NO_SHAPE)
    same = []
    for name in _presets_of_size().get((model.d_model, model.vocab_size), ()):
        other = _preset(name)
        if {field: getattr(other, field) for field in mine} == {field: getattr(model, field) for field in mine}:
            same.append(name)
    return max(same, key=lambda name: SequenceMatcher(None, name, model.name.lower()).ratio(), default=None)


@cache
def _presets_of_size() -> dict[tuple[int, int], list[str]]:
    """Presets by d_model and vocab_size."""
    found = dict[tuple[int, int], list[str]]()
    for name in preset_names():
        sizes = model_fields(PRESETS / f"{name}.toml")
        found.setdefault((sizes["d_model"], sizes["vocab_size"]), []).append(name)
    return found


@cache  # what ships does not change while a process runs
def _preset(name: str) -> Model:
    return Model.parse(model_fields(PRESETS / f"{name}.toml"), f"{PRESETS / name}.toml", ModelError)
