"""What a scheduler may hand out, and how far a request has come."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.studies.serving.workload import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one scheduler: cache blocks and their tokens, sequences at once, tokens a step.

    chunked: prompts are cut. mixed: sequences decode in steps that compute prompts; None: where they are cut.
    reuses: beginnings of prompts that are in the cache are not computed again.
    reserved: part of the answers of running sequences that a new one leaves blocks for; it needs all of its own then.
    window_tokens, window_share: tokens of a sequence that some layers cache at most, and their part of what the others cache of one.
    window_part: these layers have room for such a part of the others' tokens. state_blocks: of a sequence, whatever its length.
    host_blocks: of preempted sequences, that the host's memory keeps.
    hands_over: the blocks of an answered request stay until `release`, as another engine reads them.
    alternates, waiting_ratio, waiting_steps: of a stack's engine, when requests are admitted while others run.
    apart: prompts are computed but for their last token, which decodes in the same step, as many as there are.
    """

    num_blocks: int
    block_size: int
    max_sequences: int
    max_tokens: int
    chunked: bool
    mixed: bool | None = None
    reuses: bool = True
    reserved: float = 0.0
    windows: tuple[int | None, ...] = (None,)
    window_tokens: int = 0
    window_share: float = 0.0
    window_part: float = 1.0
    state_blocks: int = 0
    host_blocks: int = 0
    hands_over: bool = False
    alternates: bool = False
    waiting_ratio: float = 0.0
    waiting_steps: int = 0
    apart: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState:
    """A request on its way. `cached` tokens and `done` tokens of its answer were true at decoding step `since`.

    One that waits with cached tokens comes from an engine that computed its prompt, or from the host's memory, and only
    decodes. hosted: its blocks there.
    """

    request: Request
    index: int
    cached: int = 0
    done: int = 0
    since: int = 0
    preemptions: int = 0
    hosted: int = 0
    first_s: float | None = None
    end_s: float | None = None

    @property
    def known(self) -> int:
        """Tokens of prompt and answer so far: what a prefill computes."""
        return self.request.prompt_tokens + self.done
