"""Fits of NCCL's links: launch, hop, efficiency, fill and drain of each mode, from nccl-tests sweeps.

The model is the simulator's own: NCCL's choice of algorithm and protocol and the closed forms are taken as they are,
only the coefficients of simulator/collective_curves.py are free. Ports are fitted on single-node sweeps; then networks
on multi-node sweeps with the ports held. Robust residuals of log time; a weak prior keeps what no sweep shows near its
physical value. Each port and network is fitted again without each of its machines in turn: the spread of the left-out
machines' large messages is what `between_machines` says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from simulator.collective_curves import LinkCurves
from simulator.collectives.cost import algorithm_of, nic_part, nic_share
from simulator.collectives.volumes import volume
from validate.fit.sweeps import Sample, band

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Terms:
    """The samples as arrays: everything of the model that is not a coefficient."""

    mode: NDArray[np.int64]
    port_s: Array  # bytes over the data sheet's speed
    nic_s: Array
    loops: Array  # 1 / steps of a loop, 0 where nothing loops
    local_steps: Array
    network_steps: Array
    time_s: Array
    weight: Array


def terms(samples: Sequence[Sample], modes: Sequence[str]) -> Terms:
    """Closed forms of each sample, with the weight that lets each sweep and size band count alike."""
    empty = LinkCurves(name="fit")
    rows = []
    for sample in samples:
        algorithm, protocol = algorithm_of(sample.call, empty)
        call = sample.call
        form = volume(call.kind, algorithm, call.place.num_ranks, call.place.num_domains)
        share = float(nic_share(call.links))
        rows.append(
            (
                modes.index(f"{algorithm}/{protocol}"),
                float(form.port * call.links.detour) * call.size_bytes / call.links.port_bytes_per_s,
                float(form.nic * nic_part(call)) * call.size_bytes / share if share else 0.0,
                1 / form.loop_steps if form.loop_steps else 0.0,
                form.local_steps,
                form.network_steps,
                sample.time_s,
            )
        )
    mode, port_s, nic_s, loops, local, network, time_s = (np.array(c, dtype=float) for c in zip(*rows, strict=True))
    return Terms(mode.astype(np.int64), port_s, nic_s, loops, local, network, time_s, _weights(samples))


def _weights(samples: Sequence[Sample]) -> Array:
    cells = [(s.machine, s.place, band(s.call.size_bytes)) for s in samples]
    count = Counter(cells)
    tolerance = {"small": 0.15, "mid": 0.10, "large": 0.04}
    return np.array([1 / math.sqrt(count[c]) / tolerance[c[2]] * 3 for c in cells])


PORT_MODES = (
    *(f"{a}/{p}" for a in ("ring", "tree") for p in ("ll", "ll128", "simple")),
    *("nvls/simple", "nvlstree/simple", "p2p/ll", "p2p/simple", "send/ll", "send/simple"),
)
FIELDS = ("efficiency", "base_s", "hop_s", "fill_s", "fill_half_s", "drain")
SPREAD = (0.15, 0.5, 0.5, 0.7, 0.7, 0.5)  # standard deviation of the priors' logarithm


def seconds(t: Terms, near: Array, far: Array | None = None) -> Array:
    """The simulator's formula over arrays: base + hops + transfer + fill. A row of FIELDS a sample: its port's, its network's."""
    transfer = t.port_s / near[:, 0] * (1 + near[:, 5] * t.loops)
    start = near[:, 1] + t.local_steps * near[:, 2]
    if far is not None:
        transfer = np.maximum(transfer, t.nic_s / far[:, 0])
        start = start + far[:, 1] + t.network_steps * far[:, 2]
    filling = near if far is None else far
    return start + transfer + filling[:, 3] * np.sqrt(transfer / (transfer + filling[:, 4]))


def prior(efficiency: float, base_s: float, hop_s: float, fill_s: float, half_s: float, nvls: float = 0.85) -> Array:
    """Physical values of every mode from those of the ring with whole chunks.

    LL carries 8 bytes in 16 and waits for no chunk; LL128 120 in 128; NVLS reaches 0.85 of its port (NCCL's own factor).
    """
    rows = []
    for name in PORT_MODES:
        algorithm, protocol = name.split("/")
        share = {"ll": 0.45, "ll128": 0.92, "simple": 1.0}[protocol] * (nvls if algorithm.startswith("nvls") else 1.0)
        slow = {"ll": 1.0, "ll128": 1.5, "simple": 3.0}[protocol]
        hop = 0.1 * hop_s if algorithm == "p2p" else hop_s * slow
        fill = fill_s * (0.1 if protocol == "ll" else 1.0)
        rows.append((efficiency * share, base_s * (1 if protocol == "ll" else 1.5), hop, fill, half_s, 0.4))
    return np.array(rows)


def fit(t: Terms, start: Array, near: Array | None = None) -> Array:
    """A table of coefficients of a port, or (with each sample's port row in `near`) of a network.

    Robust least squares on log time; the prior's spread is the unit of each free logarithm.
    """
    used = np.unique(t.mode)
    scale = np.tile(SPREAD, len(used))
    origin, log_time = np.log(start[used]).ravel(), np.log(t.time_s)

    def unpack(x: Array) -> Array:
        table = start.copy()
        table[used] = np.exp(origin + x * scale).reshape(-1, len(FIELDS))
        table[:, 0] = np.minimum(table[:, 0], 1.0)  # no link is faster than its data sheet
        return table

    def residuals(x: Array) -> Array:
        rows = unpack(x)[t.mode]
        predicted = seconds(t, rows) if near is None else seconds(t, near, rows)
        return np.concatenate([t.weight * (np.log(predicted) - log_time), x])

    return unpack(least_squares(residuals, np.zeros(origin.size), loss="soft_l1", max_nfev=200).x)


# -------------------------------------------------------------------------------------------------------------- results

# Data sheet speed one way, NCCL's channels and those of NVLS (nccl 2.30.7: 12 graph channels doubled; nvlsChannels 16
# on sm90, 24 on sm100), and where the priors start: efficiency, launch, hop, fill, fill_half.
PORTS = {
    "nvlink2": ("nvlink", 150e9, 24, 0, (0.83, 10e-6, 1.0e-6, 2.0e-4, 1e-3)),
    "nvlink3": ("nvlink", 300e9, 24, 0, (0.80, 7e-6, 0.8e-6, 2.0e-4, 1e-3)),
    "nvlink4": ("nvlink", 450e9, 24, 16, (0.825, 5e-6, 0.8e-6, 1.5e-4, 1e-3)),
    "nvlink5": ("nvlink", 900e9, 24, 24, (0.80, 8e-6, 1.0e-6, 1.5e-4, 1e-3)),
    "pcie4": ("pcie", 31.5e9, 4, 0, (0.65, 6e-6, 2.0e-6, 5.0e-5, 1e-3)),
}
NETWORK_PRIORS = {
    "infiniband": (0.93, 5e-6, 2e-6, 1.5e-4, 3e-4),
    "roce": (0.90, 5e-6, 2e-6, 1.5e-4, 3e-4),
    "efa": (0.90, 15e-6, 5e-6, 4.0e-4, 1e-3),
    "ethernet": (0.90, 15e-6, 5e-6, 4.0e-4, 1e-3),
    "tcpx": (0.80, 15e-6, 5e-6, 4.0e-4, 1e-3),
    "slingshot": (0.85, 20e-6, 5e-6, 5.0e-4, 1e-3),
}
STANDS_FOR = {"infiniband": ("infiniband", "omnipath")}
LONE_MACHINE = 0.08  # spread between machines where only one was measured: what the others show


def fit_port(samples: Sequence[Sample], name: str) -> Array:
    """The table of a port from its single-node samples."""
    return fit(terms(samples, PORT_MODES), prior(*PORTS[name][4]))


def fit_network(samples: Sequence[Sample], name: str, ports: dict[str, Array]) -> Array:
    """The table of a network from its multi-node samples, ports held."""
    t = terms(samples, PORT_MODES)
    return fit(t, prior(*NETWORK_PRIORS[name], nvls=1.0), near_rows(samples, t, ports))


def near_rows(samples: Sequence[Sample], t: Terms, ports: dict[str, Array]) -> Array:
    """The port's coefficients of each sample."""
    return np.array([ports[s.call.links.port_kind][m] for s, m in zip(samples, t.mode, strict=True)])


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
    rows = {
        mode: dict(zip(FIELDS, (significant(float(v)) for v in row), strict=True))
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


def fit_all(samples: Sequence[Sample]) -> tuple[list[dict[str, object]], list[dict[str, object]], list[Sample], Array]:
    """Entries of ports and of networks; then all samples in the order of the errors that come last."""
    tables: dict[str, Array] = {}
    ports, networks, order, all_errors = [], [], [], []
    for name, (family, speed, channels, nvls, _) in PORTS.items():
        part = [s for s in samples if not s.network and s.call.links.port_kind == name]
        tables[name] = fit_port(part, name)
        error = errors(part, tables[name])
        left_out = between(part, partial(_port_without, name))
        own = {"family": family, "bytes_per_s": speed, "num_channels": channels, "num_nvls_channels": nvls}
        ports.append(entry(name, tables[name], part, error, left_out) | own)
        order += part
        all_errors.append(error)
    for name in NETWORK_PRIORS:
        part = [s for s in samples if s.network == name]
        table = fit_network(part, name, tables)
        error = errors(part, table, tables)
        left_out = between(part, partial(_network_without, name, tables))
        networks.append(entry(name, table, part, error, left_out) | {"kinds": STANDS_FOR.get(name, (name,))})
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
