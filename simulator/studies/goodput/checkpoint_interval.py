"""How often to save, in closed form."""

from __future__ import annotations

from math import ceil, exp, expm1, inf, sqrt

# M mean time between failures, δ what a checkpoint holds training up, τ work between two
# checkpoints, R time to be training again, T_s work in all


def young_s(mtbf_s: float, checkpoint_s: float) -> float:
    """τ = √(2 δ M) (Young, Communications of the ACM 17(9), 1974)."""
    return sqrt(2 * checkpoint_s * mtbf_s)


def daly_s(mtbf_s: float, checkpoint_s: float) -> float:
    """Work between checkpoints that makes a run shortest (Daly, Future Generation Computer Systems 22, 2006, eq. 37).

    τ = √(2 δ M) [1 + 1/3 √(δ/2M) + 1/9 (δ/2M)] − δ for δ < 2 M, else M.
    """
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    x = checkpoint_s / (2 * mtbf_s)
    return young_s(mtbf_s, checkpoint_s) * (1 + sqrt(x) / 3 + x / 9) - checkpoint_s


def expected_s(work_s: float, mtbf_s: float, checkpoint_s: float, interval_s: float, restart_s: float) -> float:
    """Expected wall-clock of `work_s` of training: M e^(R/M) (e^((τ+δ)/M) − 1) T_s/τ (Daly 2006, section 3).

    Failures are exponential and strike during restarts as well. Holds for runs of many intervals. mtbf_s: infinite where
    none strike: then it is the work and the checkpoints between.
    """
    segments = work_s / interval_s
    if mtbf_s == inf:
        return work_s + max(ceil(segments) - 1, 0) * checkpoint_s
    return mtbf_s * exp(restart_s / mtbf_s) * expm1((interval_s + checkpoint_s) / mtbf_s) * segments
