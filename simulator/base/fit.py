"""Whether a plan fits the memory that it is given: three words, used by every command, file and page."""

from __future__ import annotations

from enum import StrEnum

from simulator.base.exit_codes import ExitCode


class Fit(StrEnum):
    """The verdict on memory. The values are printed and written to JSON; the best first.

    FITS: even the upper end of the memory's 90 % interval fits, so the allocator never has to retry.
    TIGHT: the best estimate fits, but either only after the caching allocator gave its cache back and tried again, which
    takes time in every step, or the upper end of the interval does not.
    DOES_NOT_FIT: live bytes or the best estimate exceed what there is.
    """

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"

    @property
    def runs(self) -> bool:
        """The best estimate is that a step ends."""
        return self is not Fit.DOES_NOT_FIT

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a command."""
        return ExitCode.OK if self.runs else ExitCode.DOES_NOT_FIT

    @property
    def rank(self) -> int:
        """0 is the best."""
        return list(Fit).index(self)


def fit_of(*, live_bytes: int, best_bytes: int, upper_bytes: int, capacity_bytes: int) -> Fit:
    """The verdict on bytes that a device is asked for, each with all that lies beside the allocator.

    best_bytes: the best estimate of what is held, after retries where memory ends too early. upper_bytes: the upper end
    of what would be held without them.
    """
    if max(live_bytes, best_bytes) > capacity_bytes:
        return Fit.DOES_NOT_FIT
    return Fit.FITS if upper_bytes <= capacity_bytes else Fit.TIGHT
