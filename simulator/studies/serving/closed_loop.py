"""A closed loop of users: which request comes next, and when."""

from __future__ import annotations

from dataclasses import replace

from simulator.studies.serving.limits import RequestState
from simulator.studies.serving.served import ServedRequests
from simulator.studies.serving.workload import Users


class ClosedLoop:
    """Which request comes next where users wait for answers, and when."""

    def __init__(self, jobs: ServedRequests, users: Users) -> None:
        self._jobs, self._users = jobs, users
        self._sent = 0
        self.thins_out = False  # users who think: the first of them has nothing more to send

    def first(self) -> list[RequestState]:
        """The first request of each user, at its own time."""
        self._sent = min(self._users.count, len(self._jobs))
        return [self._jobs.state(index) for index in range(self._sent)]

    def behind(self, answered: RequestState) -> RequestState | None:
        """What the user sends next whose request is answered; None: nothing."""
        users = self._users
        index = answered.index + users.count if users.turns > 1 else self._sent
        if index >= len(self._jobs):
            self.thins_out = bool(users.gaps_s)
            return None
        self._sent += 1
        job = self._jobs.state(index)
        assert answered.end_s is not None
        job.request = replace(job.request, arrival_s=answered.end_s + (users.gaps_s[index] if users.gaps_s else 0.0))
        return job
