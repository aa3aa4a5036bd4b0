"""A captured program made by hand: layers that repeat, with every kind of event."""

from __future__ import annotations

import json
from typing import Any

from simulator.work.captured.capture import Kind

PRODUCT = ["aten.mm.default", [[["T", "bf16", [64, 64], None]] * 2, []], ["T", "bf16", [64, 64], None]]


def step(layers: int, number: int) -> tuple[list[list[int]], dict[str, str]]:
    """Layers that make four storages each, keep two of them, and free those in the backward, newest first."""
    events: list[list[int]] = []
    categories: dict[str, str] = {}
    storage, call, kept = 1000 * number, 0, list[tuple[int, int]]()

    def allocate(category: str) -> int:
        nonlocal storage
        storage += 1
        categories[str(storage)] = category
        events.append([Kind.ALLOCATE, storage, 512 * (storage % 4 + 1), 0])
        return storage

    for layer in range(layers):
        for _ in range(2):
            kept.append((layer, allocate("activations")))
            events.append([Kind.OPERATOR, 0, 0, layer + 1, 0])
            events.append([Kind.FREE, allocate("temporaries")])
        events += [[Kind.COLLECTIVE, call, 0, 0, 4096, 0], [Kind.RECORD, call, 0], [Kind.WAIT_WORK, 0, call]]
        call += 1
    while kept:
        layer, last = kept.pop()
        gradient = allocate("gradients")  # stays to the end
        events += [[Kind.OPERATOR, 0, 0, layer + 1, 1], [Kind.FREE, last], [Kind.RECORD_STREAM, gradient, 3]]
        events += [[Kind.MESSAGE, call, 0, 0, 1, 64, 0, call - layers], [Kind.WAIT_EVENT, 0, layers - 1]]
        call += 1
    return [*events, [Kind.STEP, number]], categories


def data(layers: int, ranks: int = 1) -> dict[str, Any]:
    names = ["all_reduce", *(f"body.{layer}.block2.product" for layer in range(layers))]
    each = []
    for rank in range(ranks):
        events, categories = step(layers, 1)
        each.append({"rank": rank, "steady": 0, "categories": categories, "answers": {}, "events": events})
    return {
        "format": "shardwise capture", "version": 2, "target": "by hand", "torch": "2.13.0", "world_size": 8,
        "gpus_per_node": 8, "device": "h100-sxm5-80gb", "signatures": [PRODUCT], "names": names, "groups": [[0, 1]],
        "ranks": json.loads(json.dumps(each)),
    }  # fmt: skip
