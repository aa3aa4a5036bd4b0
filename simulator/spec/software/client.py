"""Client: a benchmark program for servers and its default requests, `topologies/clients/<name>.toml`."""

from __future__ import annotations

import functools
from typing import Self

from pydantic import Field, model_validator

from simulator.base.errors import InputError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import Strict, read_toml
from simulator.spec.software.described import Described, named_in


class ClientLoad(Strict):
    """`[load]`: of a closed loop, whose users all begin at once and are all counted, behind a warm-up that has ended.

    requests_per_user, num_requests: how many in all, where a row does not say it; at most one of them. shortest: prompts
    and answers have any whole number of tokens from that part of the stated one to the stated one, equally likely; at least 1.
    """

    requests_per_user: int | None = Field(ge=1, le=10**4, default=None)
    num_requests: int | None = Field(ge=1, le=10**6, default=None)
    shortest: float = Field(ge=0, le=1, default=1.0)

    def requests(self, users: int) -> int | None:
        """Of so many users; None where the client has no number of its own."""
        return self.requests_per_user * users if self.requests_per_user else self.num_requests


class Client(Strict):
    """One file. describes: its public names, found in free text as a stack's are. sources: of each key of `load`."""

    name: str
    describes: tuple[Described, ...] = Field(strict=False, min_length=1)
    load: ClientLoad = ClientLoad()
    sources: dict[str, str] = {}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.load.requests_per_user and self.load.num_requests:
            raise ValueError("load: requests_per_user and num_requests are the same: give one of them")
        missing = sorted(self.load.model_fields_set - self.sources.keys())
        if missing:
            raise ValueError(f"sources: none of {', '.join(missing)}")
        return self


@functools.cache
def clients() -> tuple[Client, ...]:
    """Those that ship, by file name."""
    files = sorted((TOPOLOGIES / "clients").glob("*.toml"))
    return tuple(Client.parse(read_toml(file, InputError), str(file), InputError, from_file=True) for file in files)


@functools.cache
def client_of(text: str) -> Client | None:
    """The client that a free text names; None if it names none."""
    entries = [(client, entry) for client in clients() for entry in client.describes]
    found = named_in(text, [entry for _, entry in entries])
    return next((client for client, entry in entries if found and entry is found[0]), None)
