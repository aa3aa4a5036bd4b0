"""The allocator against sequences recorded on real GPUs: every address it hands out, every segment it takes."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from simulator.allocator import AllocatorSettings, Block, CachingAllocator, round_request

ROOT = Path(__file__).resolve().parents[2]
OWN = sorted((ROOT / "experiments" / "measured").glob("*/trace-*.json.gz"))
PUBLIC = sorted((ROOT / ".." / "shared" / "data" / "snapshots").glob("*.json.gz"))

SMALL_BYTES = 2**20

Event = dict[str, Any]


def load(path: Path) -> tuple[list[Event], list[dict[str, Any]]]:
    with gzip.open(path) as file:
        data = json.load(file)
    return next(trace for trace in data["device_traces"] if trace), data["segments"]


class Start:
    """The allocator's state before the first event: final segments with the events undone."""

    def __init__(self, events: list[Event], segments: list[dict[str, Any]]) -> None:
        self.segments = {
            s["address"]: (s["total_size"], s["stream"], s["segment_type"] == "small", s.get("is_expandable", False))
            for s in segments
        }
        self.live: dict[int, tuple[int, int | None]] = {
            address: (block["requested_size"], block["size"])
            for segment in segments
            for address, block in with_addresses(segment)
            if block["state"] != "inactive"
        }
        for event in reversed(events):
            self.undo(event)
        self.find_slack(events)

    def undo(self, event: Event) -> None:
        match event["action"]:
            case "alloc":
                self.live.pop(event["addr"], None)
            case "free_completed":
                self.live[event["addr"]] = (event["size"], None)
            case "segment_alloc":
                self.segments.pop(event["addr"], None)
            case "segment_free":
                self.segments[event["addr"]] = (event["size"], event["stream"], event["size"] == 2**21, False)

    def find_slack(self, events: list[Event]) -> None:
        """A block that begins up to 1 MiB behind one still in use shows where that one ends: no smaller rest is free."""
        starts = sorted(self.live)
        segments = sorted(self.segments)
        for event in events:
            at = bisect_right(starts, event.get("addr", 0)) - 1
            if at < 0:
                continue
            start, address = starts[at], event["addr"]
            requested, known = self.live[start]
            if event["action"] == "free_completed" and start == address:
                del starts[at]
            elif event["action"] == "alloc" and known is None and event["size"] > SMALL_BYTES:
                same = bisect_right(segments, start) == bisect_right(segments, address)
                if same and 0 < address - start - round_request(requested) <= SMALL_BYTES:
                    self.live[start] = (requested, address - start)

    def fill(self, allocator: CachingAllocator) -> dict[int, Block]:
        starts = sorted(self.segments)
        inside: dict[int, list[int]] = {start: [] for start in starts}
        for address in sorted(self.live):
            at = starts[bisect_right(starts, address) - 1]
            inside[at].append(address)
        for start in starts:
            size, stream, small, expandable = self.segments[start]
            live = self.blocks(inside[start], start + size, small=small or expandable)
            allocator.adopt(start, size, stream, small=small, live=live, expandable=expandable)
        return {block.address: block for block in allocator.blocks() if block.used}

    def blocks(self, addresses: list[int], end: int, *, small: bool) -> list[tuple[int, int, int]]:
        """A large pool never leaves a free rest of up to 1 MiB: what is left there belongs to the block before it."""
        rows = []
        for address, after in zip(addresses, [*addresses[1:], end][: len(addresses)], strict=True):
            requested, known = self.live[address]
            size = known or round_request(requested)
            if known is None and not small and after - address - size <= SMALL_BYTES:
                size = after - address
            rows.append((address, size, requested))
        return rows


def with_addresses(segment: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    address, rows = segment["address"], []
    for block in segment["blocks"]:
        rows.append((block.get("address", address), block))
        address += block["size"]
    return rows


def replay(path: Path) -> tuple[Counter[str], CachingAllocator, list[dict[str, Any]]]:
    """Play the recorded requests; count hits and misses. The recorded address wins after a miss, so misses stay single."""
    events, segments = load(path)
    given: list[tuple[int, int]] = []
    settings = AllocatorSettings(expandable_segments=any(s.get("is_expandable") for s in segments))
    allocator = CachingAllocator(settings, place=lambda num_bytes: place(given, num_bytes, score))
    score: Counter[str] = Counter()
    at = Start(events, segments).fill(allocator)
    for event in events:
        address = event.get("addr")
        match event["action"]:
            case "segment_alloc":
                given.append((address, event["size"]))
            case "segment_free":
                allocator.empty_segment(address)
                score["segments returned"] += 1
            case "alloc":
                block = allocator.malloc(event["size"], event["stream"])
                score["allocations" if block.address == address else "wrong addresses"] += 1
                at[address] = block
                score["segments not taken"] += len(given)
                given.clear()
            case "free_completed":
                allocator.free(at.pop(address))
    return score, allocator, segments


def place(given: list[tuple[int, int]], num_bytes: int, score: Counter[str]) -> int:
    if not given:
        score["segments too many"] += 1
        return 2**60 + score["segments too many"] * 2**40
    address, size = given.pop()
    score["segments" if size == num_bytes else "wrong segment sizes"] += 1
    return address


def check(path: Path) -> None:
    score, allocator, segments = replay(path)
    assert {kind for kind, count in score.items() if count} <= {"allocations", "segments", "segments returned"}, score
    assert score["allocations"] > 0
    assert allocator.reserved_bytes == sum(s["total_size"] for s in segments)
    assert allocator.allocated_bytes == sum(s["allocated_size"] for s in segments)


@pytest.mark.parametrize("path", OWN, ids=lambda p: p.name.split(".")[0])
def test_own_traces_replay_to_the_byte(path: Path) -> None:
    check(path)


@pytest.mark.parametrize("path", PUBLIC or [None], ids=lambda p: p.name.split(".")[0] if p else "absent")
def test_public_traces_replay_to_the_byte(path: Path | None) -> None:
    if path is None:
        pytest.skip("the public snapshots are not in ../shared/data/snapshots")
    check(path)
