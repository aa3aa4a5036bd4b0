"""Recordings of several ranks of one step: their clocks aligned, their collectives joined.

Clocks are aligned by the ends of the collectives that two ranks have in common: a collective ends for all of them at about
the same moment (dPRO, arXiv 2205.02473, aligns the clocks of workers by what they exchange). Once they are, what a rank waited for the
others before a collective is known apart from what the collective itself took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from simulator.work.recorded.recording import RecordedOp, Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Recordings whose collectives end together. shifts_s: when each begins after the first. roles: groups that meet."""

    recordings: tuple[Recording, ...]
    shifts_s: tuple[float, ...]
    roles: frozenset[str]
    notes: tuple[str, ...]


def role_of(op: RecordedOp) -> str:
    """The group of a collective, as scripts name it."""
    assert op.carried is not None
    return ",".join(map(str, op.carried.ranks)) or op.carried.group


def aligned(recordings: Sequence[Recording]) -> Ranks:
    """One recording, or several of one step."""
    if len(recordings) == 1:
        return Ranks(recordings=tuple(recordings), shifts_s=(0.0,), roles=frozenset(), notes=())
    sent = [_by_role(one) for one in recordings]
    names = dict.fromkeys(role for one in sent for role in one)
    roles = [role for role in names if role and _same([one[role] for one in sent if role in one], recordings)]
    offsets = [_offset(recordings, sent, roles, number) for number in range(len(recordings))]
    notes = [f"clocks aligned by {sum(len(sent[0].get(role, ())) for role in roles)} collectives"] if roles else []
    notes += [
        f"group {role or '?'}: its ranks recorded different collectives, which are played apart"
        for role in names
        if role not in roles
    ]
    begins = [one.origin_s + offset for one, offset in zip(recordings, offsets, strict=True)]
    joint = [dict[int, tuple[float, float]]() for _ in recordings]
    for role in roles:
        _join(role, recordings, sent, begins, joint)
    made = tuple(_joined(one, ends) for one, ends in zip(recordings, joint, strict=True))
    first = min(begins)
    return Ranks(
        recordings=made, shifts_s=tuple(begin - first for begin in begins), roles=frozenset(roles), notes=tuple(notes)
    )


def _by_role(one: Recording) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, op in enumerate(one.ops):
        if op.carried is not None:
            found.setdefault(role_of(op), []).append(index)
    return found


def _same(lists: Sequence[Sequence[int]], recordings: Sequence[Recording]) -> bool:
    """Several ranks have the group, with equally many collectives."""
    return len(lists) > 1 and len({len(one) for one in lists}) == 1 and len(recordings) > 1


def _offset(
    recordings: Sequence[Recording], sent: Sequence[dict[str, list[int]]], roles: Sequence[str], number: int
) -> float:
    """What to add to a rank's clock to have the first rank's; nothing where they have no collective in common."""
    if number == 0:
        return 0.0
    first, one = recordings[0], recordings[number]
    apart = [
        (first.origin_s + first.ops[a].end_s) - (one.origin_s + one.ops[b].end_s)
        for role in roles
        if role in sent[0] and role in sent[number]
        for a, b in zip(sent[0][role], sent[number][role], strict=True)
    ]
    return median(apart) if apart else 0.0


def _join(
    role: str,
    recordings: Sequence[Recording],
    sent: Sequence[dict[str, list[int]]],
    begins: Sequence[float],
    joint: Sequence[dict[int, tuple[float, float]]],
) -> None:
    """Every collective of a group ends where the first of its ranks saw it end, but not before the last one came."""
    those = [number for number, one in enumerate(sent) if role in one]
    for indices in zip(*(sent[number][role] for number in those), strict=True):
        ops = [recordings[number].ops[index] for number, index in zip(those, indices, strict=True)]
        came = max(begins[number] + op.start_s for number, op in zip(those, ops, strict=True))
        over = max(came, min(begins[number] + op.end_s for number, op in zip(those, ops, strict=True)))
        for number, index in zip(those, indices, strict=True):
            joint[number][index] = (over - begins[number], over - came)


def _joined(one: Recording, ends: dict[int, tuple[float, float]]) -> Recording:
    ops = tuple(
        replace(op, end_s=ends[index][0], alone_s=ends[index][1]) if index in ends else op
        for index, op in enumerate(one.ops)
    )
    return replace(one, ops=ops)
