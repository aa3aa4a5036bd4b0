"""Fits of NCCL's links: launch, hop, efficiency, fill and drain of each mode, from nccl-tests sweeps.

The model is the simulator's own: NCCL's choice of algorithm and protocol and the closed forms are taken as they are,
only the coefficients of simulator/spec/calibration/collective_curves.py are free. Ports are fitted on single-node sweeps; then networks
on multi-node sweeps with the ports held. Robust residuals of log time; a weak prior keeps what no sweep shows near its
physical value. Each port and network is fitted again without each of its machines in turn: the spread of the left-out
machines' large messages is what `between_machines` says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.work.collectives.call import Call, nic_part, nic_share
from simulator.work.collectives.cost import algorithm_of, form_of
from simulator.work.collectives.latency import LOOPS
from simulator.work.collectives.proxy_messages import copied, crowd, posted_channels
from simulator.work.collectives.volumes import Volume
from validate.fit.link_classes import (
    FIELDS,
    NEAR_PAIRS,
    NETWORKS,
    PORT_MODES,
    PORTS,
    RINGS,
    SENDS,
    SPREAD,
    Array,
    network_class,
    network_prior,
    port_class,
    prior,
)
from validate.fit.sweeps import Sample, band

CHUNKS = PORT_MODES.index("ring/simple")  # whose steps go on while other chunks are under way


@dataclass(frozen=True)
class Terms:
    """The samples as arrays: everything of the model that is not a coefficient."""

    mode: NDArray[np.int64]
    port_s: Array  # bytes over the data sheet's speed
    nic_s: Array
    loops: Array  # 1 / steps of a loop, 0 where nothing loops
    local_steps: Array
    network_steps: Array
    depth: Array  # of the fill over nodes
    waits: Array  # 1 where the fill is a bound beside the transfer's
    channels: Array  # that a ring's host posts messages for
    crowd: Array  # streams of others that pairs of nodes meet
    copied: Array  # messages that the host copies out of GPU memory
    time_s: Array
    weight: Array


def terms(samples: Sequence[Sample], modes: Sequence[str]) -> Terms:
    """Closed forms of each sample, with the weight that lets each sweep and size band count alike."""
    of_call = cache(_of_call)  # a log of many iterations repeats its calls
    rows = [(modes.index(found[0]), *found[1:], one.time_s) for one in samples for found in [of_call(one.call)]]
    columns = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    mode, port_s, nic_s, loops, local, network, depth, waits, channels, crowds, copies, time_s = columns
    return Terms(
        mode.astype(np.int64),
        port_s,
        nic_s,
        loops,
        local,
        network,
        depth,
        waits,
        channels,
        crowds,
        copies,
        time_s,
        _weights(samples),
    )


def _of_call(call: Call) -> tuple[Any, ...]:
    """Mode, and what `Terms` holds of a call, in its order."""
    algorithm, protocol = algorithm_of(call, LinkCurves(name="fit"))
    form = form_of(call, algorithm)
    share = float(nic_share(call.links))
    return (
        f"{algorithm}/{protocol}",
        float(form.port * call.links.detour) * call.size_bytes / call.port.bytes_per_s,
        float(form.nic * nic_part(call)) * call.size_bytes / share if share else 0.0,
        1 / form.loop_steps if form.loop_steps else 0.0,
        form.local_steps,
        form.network_steps,
        *_waits(call, algorithm, protocol, form),
    )


def _waits(call: Call, algorithm: str, protocol: str, form: Volume) -> tuple[float, bool, int, float, int]:
    """Depth of the fill, whether it is a bound, channels, others' streams, and messages that the host copies."""
    network = NETWORKS.get(network_class(call)) if call.place.num_domains > 1 else None
    if network is None or algorithm in ("p2p", "send"):
        small = network is not None and copied(call, network.structure)
        return 1.0, False, 1, crowd(call), form.network_steps if small else 0
    shape, ring = network.structure, algorithm in LOOPS
    depth = shape.fill_depth(form.local_steps + form.network_steps, protocol, ring=ring)
    return depth, shape.waits(protocol, ring=ring), posted_channels(call, algorithm, protocol), 0.0, 0


def _weights(samples: Sequence[Sample]) -> Array:
    cells = [(s.machine, s.place, band(s.call.size_bytes)) for s in samples]
    count = Counter(cells)
    tolerance = {"small": 0.15, "mid": 0.10, "large": 0.04}
    return np.array([1 / math.sqrt(count[c]) / tolerance[c[2]] * 3 for c in cells])


def seconds(t: Terms, near: Array, far: Array | None = None) -> Array:
    """The simulator's formula over arrays: base + hops + transfer + fill. A row of FIELDS a sample: its port's, its network's."""
    transfer = t.port_s / near[:, 0] * (1 + near[:, 5] * t.loops)
    if far is None:
        start = near[:, 1] + t.local_steps * near[:, 2]
        return start + transfer + near[:, 3] * np.sqrt(transfer / (transfer + near[:, 4]))
    transfer = np.maximum(transfer, t.nic_s / far[:, 0] * (1 + t.crowd * far[:, 8]))
    near_hop = np.where(np.isin(t.mode, RINGS), np.maximum(near[:, 2], t.channels * far[:, 6]), near[:, 2])
    far_hop = far[:, 2] + (t.channels - 1) * far[:, 6]
    start = near[:, 1] + far[:, 1] + t.local_steps * near_hop + t.network_steps * far_hop
    start = start + t.copied * far[:, 7]
    fill = far[:, 3] * t.depth * np.sqrt(transfer / (transfer + far[:, 4]))
    bound, steps = np.maximum(transfer, fill), t.local_steps * near_hop + t.network_steps * far_hop
    waits = np.where(t.mode == CHUNKS, np.maximum(bound - steps, 0.0), bound)  # NetworkCurves.start_s
    return start + np.where(t.waits > 0, waits, transfer + fill)


def fit(t: Terms, start: Array, near: Array | None = None) -> Array:
    """A table of coefficients of a port, or (with each sample's port row in `near`) of a network.

    All-to-alls first: what they show is where sends start from.
    """
    pairs = np.isin(t.mode, list(SENDS.values()))
    if pairs.any() and np.isin(t.mode, list(SENDS)).any():
        alone = _solve(_part(t, pairs), start, None if near is None else near[pairs])
        start = start.copy()
        for send, pair in SENDS.items():
            if pair in t.mode:
                start[send] = [*alone[pair][:5], 0.0001, *alone[pair][6:]]
    return _solve(t, start, near)


def _part(t: Terms, which: NDArray[np.bool_]) -> Terms:
    return Terms(*(getattr(t, field.name)[which] for field in fields(Terms)))


def _solve(t: Terms, start: Array, near: Array | None) -> Array:
    """One mode after the other: no coefficient is shared between them."""
    table = start.copy()
    modes = np.unique(t.mode)
    for mode in modes:
        which = t.mode == mode
        spread = NEAR_PAIRS if SENDS.get(int(mode)) in modes else SPREAD
        own = near[which] if near is not None else None
        table[mode] = _one_mode(_part(t, which), start[mode], np.array(spread), own)
    return table


def _one_mode(t: Terms, start: Array, spread: Array, near: Array | None) -> Array:
    """Robust least squares on log time; the prior's spread is the unit of each free logarithm."""
    origin, log_time = np.log(start), np.log(t.time_s)

    def unpack(x: Array) -> Array:
        row = np.exp(origin + x * spread)
        row[0] = min(row[0], 1.0)  # no link is faster than its data sheet
        return np.tile(row, (log_time.size, 1))

    def residuals(x: Array) -> Array:
        rows = unpack(x)
        predicted = seconds(t, rows) if near is None else seconds(t, near, rows)
        return np.concatenate([t.weight * (np.log(predicted) - log_time), x])

    found: Array = unpack(least_squares(residuals, np.zeros(len(FIELDS)), loss="soft_l1", max_nfev=200).x)[0]
    return found


_PAIR, _STEADY_BYTES, _FULL_NICS = 2, 4 * 2**30, 0.8
LONE_MACHINE = 0.08  # spread between machines where only one was measured: what the others show


def fit_port(samples: Sequence[Sample], name: str) -> Array:
    """The table of a port from its single-node samples."""
    return fit(terms(samples, PORT_MODES), prior(*PORTS[name][4]))


def fit_network(samples: Sequence[Sample], name: str, ports: dict[str, Array]) -> Array:
    """The table of a network from its multi-node samples, ports held."""
    t = terms(samples, PORT_MODES)
    return fit(t, network_prior(name), near_rows(samples, t, ports))


def near_rows(samples: Sequence[Sample], t: Terms, ports: dict[str, Array]) -> Array:
    """The port's coefficients of each sample."""
    return np.array([ports[port_class(s.call)][m] for s, m in zip(samples, t.mode, strict=True)])


def errors(samples: Sequence[Sample], table: Array, ports: dict[str, Array] | None = None) -> Array:
    """log(predicted / measured) of each sample."""
    t = terms(samples, PORT_MODES)
    rows = table[t.mode]
    predicted = seconds(t, rows) if ports is None else seconds(t, near_rows(samples, t, ports), rows)
    return np.log(predicted / t.time_s)


def between(
    samples: Sequence[Sample], predict: Callable[[Sequence[Sample], Sequence[Sample]], Array]
) -> dict[str, float]:
    """Median error of the large messages of each machine, fitted without it: predict(the others, its large ones)."""
    machines = sorted({s.machine for s in samples})
    found = {}
    for machine in machines if len(machines) > 1 else []:
        rest = [s for s in samples if s.machine != machine]
        large = [s for s in samples if s.machine == machine and band(s.call.size_bytes) == "large"]
        if large:
            found[machine] = float(np.median(predict(rest, large)))
    return found


def quality(samples: Sequence[Sample], error: Array, left_out: dict[str, float]) -> dict[str, float | int]:
    """What Quality holds."""
    sizes = [s.call.size_bytes for s in samples]
    found: dict[str, float | int] = {}
    for name in ("small", "mid", "large"):
        part = np.abs([e for e, size in zip(error, sizes, strict=True) if band(size) == name])
        for p in (50, 95):
            found[f"{name}_p{p}"] = significant(float(np.percentile(part, p))) if part.size else 0.5
    spread = math.sqrt(float(np.mean(np.square(list(left_out.values()))))) if left_out else LONE_MACHINE
    return found | {
        "between_machines": significant(spread),
        "num_samples": len(sizes),
        "min_bytes": min(sizes),
        "max_bytes": max(sizes),
    }


def significant(value: float) -> float:
    """Four digits: what is written is what is read."""
    return float(f"{value:.4g}")


def entry(
    name: str, table: Array, samples: Sequence[Sample], error: Array, left_out: dict[str, float]
) -> dict[str, object]:
    """What ports and networks share in the file; `assumed` names the modes that no sweep shows."""
    seen = {PORT_MODES[i] for i in terms(samples, PORT_MODES).mode.tolist()}
    unseen = [m for m in PORT_MODES if m not in seen]
    machines = sorted({s.machine for s in samples})
    own = FIELDS if name in NETWORKS else FIELDS[:6]
    rows = {
        mode: dict(zip(own, (significant(float(v)) for v in row), strict=False))
        for mode, row in zip(PORT_MODES, table, strict=True)
    }
    return {
        "name": name,
        "modes": rows,
        "quality": quality(samples, error, left_out),
        "source": f"{len(samples)} published nccl-tests samples, {len(machines)} machines",
        "machines": {m: significant(left_out[m]) if m in left_out else None for m in machines},
        "priors": unseen,
    }


def fit_ports(parts: dict[str, list[Sample]]) -> dict[str, Array]:
    """Tables of all ports. A mode that no sweep of a port shows is that of the nearest port of its family, by speed."""
    tables = {name: fit_port(part, name) if part else prior(*PORTS[name][4]) for name, part in parts.items()}
    seen = {name: set(terms(part, PORT_MODES).mode.tolist()) if part else set() for name, part in parts.items()}
    for name, table in tables.items():
        family, speed = PORTS[name][:2]
        related = [n for n in PORTS if PORTS[n][0] == family and n != name and "-" not in n + name]
        related.sort(key=lambda n: abs(math.log(PORTS[n][1] / speed)))
        for mode in range(len(PORT_MODES)):
            relative = next((n for n in related if mode in seen[n]), None)
            if mode not in seen[name] and relative:
                table[mode] = tables[relative][mode]
    return tables


def with_trees(tables: dict[str, Array], samples: Sequence[Sample]) -> dict[str, Array]:
    """The same with what a port carries under NVLS trees, which only run over nodes.

    From pairs of nodes that move 4 GiB and more while their NICs, which carry as much, are far from full: the median over
    machines of bytes over the data sheet's rate and the time taken.
    """
    tree = PORT_MODES.index("nvlstree/simple")
    found = dict(tables)
    for name, table in tables.items():
        pairs = [s for s in samples if s.call.place.num_domains == _PAIR and s.call.size_bytes >= _STEADY_BYTES]
        pairs = [s for s in pairs if port_class(s.call) == name]
        t = terms(pairs, PORT_MODES) if pairs else None
        shares: dict[str, list[float]] = {}
        for index, sample in enumerate(pairs):
            if t is not None and t.mode[index] == tree and t.nic_s[index] < _FULL_NICS * t.time_s[index]:
                shares.setdefault(sample.machine, []).append(t.port_s[index] / t.time_s[index])
        if shares:
            found[name] = table.copy()
            found[name][tree, 0] = float(np.median([np.median(values) for values in shares.values()]))
    return found


def port_entry(
    name: str, table: Array, samples: Sequence[Sample], error: Array, left_out: dict[str, float]
) -> dict[str, object]:
    """A port as the file has it."""
    family, speed, channels, nvls, _ = PORTS[name]
    transport = name.partition("-")[2] or "direct"
    own = {
        "family": family,
        "way": transport,
        "bytes_per_s": speed,
        "num_channels": channels,
        "num_nvls_channels": nvls,
    }
    return entry(name, table, samples, error, left_out) | own


def network_entry(
    name: str, table: Array, samples: Sequence[Sample], error: Array, left_out: dict[str, float]
) -> dict[str, object]:
    """A network as the file has it."""
    network = NETWORKS[name]
    nodes = max((s.call.place.num_domains for s in samples), default=0)
    own = {
        "waiting": network.waiting,
        "copied_bytes": network.copied_bytes,
        "max_nodes": nodes,
        "nic_bytes_per_s": network.nic_bytes_per_s,
    }
    return entry(name, table, samples, error, left_out) | {"kinds": network.kinds, "when": network.when} | own


def fit_all(samples: Sequence[Sample]) -> tuple[list[dict[str, object]], list[dict[str, object]], list[Sample], Array]:
    """Entries of ports and of networks; then all samples in the order of the errors that come last.

    A class without samples is left out: what a call over it takes is its nearest relative's.
    """
    ports, networks, order, all_errors = [], [], [], []
    parts = {name: [s for s in samples if not s.network and port_class(s.call) == name] for name in PORTS}
    tables = with_trees(fit_ports(parts), samples)
    for name, part in parts.items():
        if part:
            error = errors(part, tables[name])
            ports.append(port_entry(name, tables[name], part, error, between(part, partial(_port_without, name))))
            order += part
            all_errors.append(error)
    for name in NETWORKS:
        part = [s for s in samples if s.network and network_class(s.call) == name]
        if part:
            table = fit_network(part, name, tables)
            error = errors(part, table, tables)
            left_out = between(part, partial(_network_without, name, tables))
            networks.append(network_entry(name, table, part, error, left_out))
            order += part
            all_errors.append(error)
    return ports, networks, order, np.concatenate(all_errors)


def _port_without(name: str, rest: Sequence[Sample], left_out: Sequence[Sample]) -> Array:
    return errors(left_out, fit_port(rest, name))


def _network_without(name: str, ports: dict[str, Array], rest: Sequence[Sample], left_out: Sequence[Sample]) -> Array:
    return errors(left_out, fit_network(rest, name, ports), ports)


def table_rows(curves: LinkCurves) -> dict[str, Array]:
    """Coefficients of every port that the curves have, in the order of PORT_MODES; priors for modes they lack."""
    tables = {}
    for port in curves.ports:
        start = prior(*PORTS[port.name][4]) if port.name in PORTS else prior(0.8, 7e-6, 0.8e-6, 1.5e-4, 1e-3)
        for index, name in enumerate(PORT_MODES):
            if name in port.modes:
                start[index] = [getattr(port.modes[name], f) for f in FIELDS]
        tables[port.name] = start
    return tables
