"""One rank of a burn-in: `python -m validate.burn_in.worker SETTING.json`, supervised (`validate.supervise`)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from validate.benches.worker import begun, clock_log
from validate.burn_in.checks import Check, checks_of, outvoted
from validate.report import RankReport, describe, kind_of
from validate.stopwatch import Session, SessionSettings


def main(path: str) -> int:
    """Exit status: 0 when the time is over, 1 with a fault reported."""
    report = RankReport.to_parent()
    try:
        job: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        job |= {key: tuple(job[key]) for key in ("phases", "done")}
        burn(begun(SessionSettings(**job), report))
    except BaseException as exc:  # noqa: BLE001  whatever it is, the parent must be told
        report.fault(kind_of(exc), describe(exc))
        return 1
    return 0


def burn(s: Session) -> None:
    """Rounds of every check until the time is over; all ranks play as many."""
    log, report = clock_log(s), s.report
    report.phase("first results")
    checks = list(checks_of(s))
    report.partial(checks=[check.name for check in checks])
    _beside_each_other(s, checks)
    s.phase_end_s, number = s.end_s, 0
    clocks: dict[str, Any] = {}
    while number == 0 or s.go():
        number += 1
        report.phase(f"round {number}")
        for check in checks:
            if wrong := check.play(number):
                _tell(s, check.name, number, wrong)
        clocks = _worst(clocks, log.taken())
        report.partial(rounds=number, clocks=clocks)
    log.close()
    report.result({"rounds": number, "clocks": clocks})


def _beside_each_other(s: Session, checks: list[Check]) -> None:
    """The same numbers multiplied by equal devices have the same bits."""
    if s.control is None:
        return
    device = s.torch.cuda.get_device_name() if s.gpu else ""
    gathered: list[Any] = [None] * s.num_ranks
    s.torch.distributed.all_gather_object(gathered, (device, [check.digest for check in checks]), group=s.control)
    for index, check in enumerate(checks):
        alike = [digests[index] if name == device else None for name, digests in gathered]
        if s.setting.rank in outvoted(alike):
            _tell(s, check.name, 0, "its first result has other bits than most ranks' with this device")


def _tell(s: Session, check: str, number: int, wrong: str) -> None:
    s.report.sample(
        {"kind": "wrong", "check": check, "round": number, "rank": s.setting.rank, "host": s.host, "detail": wrong}
    )


def _worst(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The lowest clock, the highest temperature and power, and every reason to hold back."""
    found = {**before, **now}
    for name, pick in {"lowest_sm_clock_mhz": min, "temperature_c": max, "power_w": max}.items():
        if name in before and name in now:
            found[name] = pick(before[name], now[name])
    reasons = dict.fromkeys(
        reason for one in (before, now) for reason in str(one.get("throttled_by", "")).split(", ") if reason
    )
    return found | ({"throttled_by": ", ".join(reasons)} if reasons else {})


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(status)  # communicators may hang in their own tear-down; everything is written
