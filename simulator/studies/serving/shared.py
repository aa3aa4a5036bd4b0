"""Shared: what the lanes of an engine share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Shared:
    """When what the lanes of an engine share is free: each stage that steps pass, the links, the front end.

    The front end is one process: a request that comes takes it accept_s, a token that goes send_s, one behind another.
    """

    free_s: list[float]
    accept_s: float
    send_s: float
    links_s: float = 0.0
    front_s: float = 0.0

    def ready_s(self, now_s: float, fetch_s: float) -> float:
        """When a request that comes now is let in and what it takes the links so long to fetch is there."""
        if self.accept_s:
            now_s = self.front_s = max(now_s, self.front_s) + self.accept_s
        if fetch_s:
            now_s = self.links_s = max(now_s, self.links_s) + fetch_s
        return now_s

    def sent_s(self, first_s: float, last_s: float, tokens: int, steps: int = 1) -> float:
        """When the last token of steps is sent that make so many each, the first and the last of which end then.

        Exact where the steps are equally long, or longer from one to the next.
        """
        if not self.send_s:
            return last_s
        each_s = tokens * self.send_s
        self.front_s = max(max(self.front_s, first_s) + steps * each_s, last_s + each_s)
        return self.front_s
