"""What became of requests, in columns: a request takes 16 bytes from its end on, however many there are."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import overload

from typing_extensions import override

from simulator.studies.serving.limits import RequestState
from simulator.studies.serving.workload import Request


@dataclass(frozen=True, slots=True)
class Served:
    """A request, when its first token came, and when its last; None: not yet."""

    request: Request
    first_s: float | None
    end_s: float | None


class ServedRequests(Sequence[Served]):
    """In order of arrival. moved: they come when others are answered (a closed loop), so that their arrivals are kept, too."""

    def __init__(self, requests: Sequence[Request], *, moved: bool = False) -> None:
        self.requests = requests
        self._first_s = array("d", [nan]) * len(requests)
        self._end_s = array("d", [nan]) * len(requests)
        self._arrival_s = array("d", [nan]) * len(requests) if moved else None

    def states(self) -> Iterator[RequestState]:
        """Each request at its beginning, made when it is asked for."""
        return (RequestState(request=request, index=i) for i, request in enumerate(self.requests))

    def state(self, index: int) -> RequestState:
        """One of them."""
        return RequestState(request=self.requests[index], index=index)

    def arriving_per_s(self, until_s: float) -> float:
        """Requests a second that come up to then; 0 where all come at once."""
        if self._arrival_s is None:
            return rate(self.requests)
        times = [at_s for at_s in self._arrival_s if at_s <= until_s]
        spanned_s = max(times) - min(times)
        return (len(times) - 1) / spanned_s if spanned_s else 0.0

    def record(self, job: RequestState) -> None:
        """It is answered."""
        self._first_s[job.index] = nan if job.first_s is None else job.first_s
        self._end_s[job.index] = nan if job.end_s is None else job.end_s
        if self._arrival_s is not None:
            self._arrival_s[job.index] = job.request.arrival_s

    @property
    def ends_s(self) -> list[float]:
        """When each was answered; 0 before it is."""
        return [end_s if end_s >= 0 else 0.0 for end_s in self._end_s]

    @override
    def __len__(self) -> int:
        return len(self.requests)

    @override
    def __iter__(self) -> Iterator[Served]:
        return map(self._at, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Served: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Served]: ...
    @override
    def __getitem__(self, index: int | slice) -> Served | Sequence[Served]:
        if isinstance(index, int):
            return self._at(range(len(self))[index])
        part = ServedRequests(self.requests[index], moved=self._arrival_s is not None)
        part._first_s, part._end_s = self._first_s[index], self._end_s[index]
        part._arrival_s = None if self._arrival_s is None else self._arrival_s[index]
        return part

    def _at(self, i: int) -> Served:
        request = self.requests[i]
        if self._arrival_s is not None:
            request = replace(request, arrival_s=self._arrival_s[i])
        return Served(request, _known(self._first_s[i]), _known(self._end_s[i]))


def rate(requests: Sequence[Request]) -> float:
    """Requests a second of those in order of arrival; 0 where all come at once."""
    spanned_s = requests[-1].arrival_s - requests[0].arrival_s
    return (len(requests) - 1) / spanned_s if spanned_s else 0.0


def _known(value: float) -> float | None:
    return None if value != value else value  # noqa: PLR0124  nan alone differs from itself
