"""Islands of a host, its PCIe groups, and which NIC is nearest to each GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Final

from simulator.spec.cluster.host.parts import PATHS, Host, Nic, Path
from simulator.spec.cluster.routing import components

MOST_LINKS: Final = 18  # NVLinks of one GPU, up to and including Blackwell (nvidia-smi nvlink -s)
_AMD_PAIR = 2  # GPUs that NCCL lets reach each other over any path on AMD
_EVEN_SPLITS_UP_TO = 16  # GPUs of an island whose even splits are all tried: 12,870


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """GPUs that NVLink or xGMI joins, by index.

    shape: alone (unlisted where the source shows no NVLinks), pair, switch, mesh (a cable for each pair), cube_mesh (two meshed quads joined pairwise), partial.
    links: links of each GPU, all peers together; through a switch its own, once. narrowest_split: links between two
    halves at the worst, None through a switch (it does not block) or for a GPU alone.
    """

    gpus: tuple[int, ...]
    shape: str
    pairs: Mapping[tuple[int, int], Path]
    links: tuple[int, ...]
    narrowest_split: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The NICs nearest to a GPU. via: the GPU beside the NIC that NCCL's PXN sends through, None without PXN."""

    gpu: int
    nics: tuple[str, ...]
    path: Path | None
    via: int | None = None

    @property
    def gpudirect(self) -> bool | None:
        """The NIC reads and writes GPU memory by itself: NCCL's default up to PXB, or by a peer. None: no NIC."""
        return None if self.path is None else self.via is not None or _is_near(self.path)

    @property
    def word(self) -> str:
        return "" if self.path is None else "PXN" if self.via is not None else str(self.path)


@lru_cache(maxsize=8)
def islands(host: Host) -> tuple[Island, ...]:
    """The sets of GPUs joined by direct links, by their first GPU."""
    direct = {(i, j): path for i, j, path in _known(host) if path.is_direct}
    parts = components(len(host.gpus), direct)
    found = tuple(_island(part, direct, switched=host.switched) for part in parts)
    return found if host.links_listed else tuple(replace(island, shape="unlisted") for island in found)


@lru_cache(maxsize=8)
def _known(host: Host) -> tuple[tuple[int, int, Path], ...]:
    """Pairs of GPUs whose path the source states."""
    return tuple((i, j, path) for i, j, path in host.gpu_pairs() if path is not None)


def _island(gpus: tuple[int, ...], direct: Mapping[tuple[int, int], Path], *, switched: bool) -> Island:
    links: dict[int, list[int]] = {gpu: [] for gpu in gpus}
    pairs = {pair: path for pair, path in direct.items() if pair[0] in links}
    for (i, j), path in pairs.items():
        links[i].append(path.count)
        links[j].append(path.count)
    sums = tuple(sum(links[gpu]) for gpu in gpus)
    shape = _shape(gpus, pairs, sums, switched=switched)
    if shape == "switch":
        sums = tuple(max(links[gpu]) for gpu in gpus)
    split = None if shape in ("switch", "alone") else _narrowest_split(gpus, pairs)
    return Island(gpus=gpus, shape=shape, pairs=pairs, links=sums, narrowest_split=split)


def _shape(
    gpus: tuple[int, ...], pairs: Mapping[tuple[int, int], Path], sums: tuple[int, ...], *, switched: bool
) -> str:
    """Counts through a switch are the same links shown to each peer, so together they exceed what a GPU has."""
    if len(gpus) == 1:
        return "alone"
    if switched or max(sums) > MOST_LINKS or any(path.count >= MOST_LINKS for path in pairs.values()):
        return "switch"
    if len(gpus) == 2:
        return "pair"
    if len(pairs) == len(gpus) * (len(gpus) - 1) // 2:
        return "mesh"
    return "cube_mesh" if _is_cube_mesh(gpus, pairs) else "partial"


def _is_cube_mesh(gpus: tuple[int, ...], pairs: Mapping[tuple[int, int], Path]) -> bool:
    """Two quads, each fully meshed, and one partner for each GPU in the other (DGX-1)."""
    if len(gpus) != 8 or len(pairs) != 16:
        return False
    quads = ((quad, tuple(g for g in gpus if g not in quad)) for quad in combinations(gpus, 4) if gpus[0] in quad)
    return any(
        all(pair in pairs for half in halves for pair in combinations(half, 2))
        and all(sum((min(a, b), max(a, b)) in pairs for b in halves[1]) == 1 for a in halves[0])
        for halves in quads
    )


def _narrowest_split(gpus: tuple[int, ...], pairs: Mapping[tuple[int, int], Path]) -> int | None:
    """Fewest links between two halves; None where there are too many halves to try."""
    if len(gpus) > _EVEN_SPLITS_UP_TO:
        return None
    halves = combinations(gpus, len(gpus) // 2)
    return min(sum(p.count for (a, b), p in pairs.items() if (a in half) != (b in half)) for half in map(set, halves))


@lru_cache(maxsize=32)
def pcie_groups(host: Host, reach: str) -> tuple[tuple[int, ...], ...]:
    """GPUs that meet at `reach` (PIX, PXB, PHB or NODE) or closer on PCIe, directly or by way of a NIC beside both."""
    near = {(i, j) for i, j, path in _known(host) if not path.is_direct and path.rank <= PATHS.index(reach)}
    for nic in host.nics:
        beside = [i for i, gpu in enumerate(host.gpus) if _reaches(host.path(gpu.name, nic.name), reach)]
        near |= set(combinations(beside, 2))
    return components(len(host.gpus), near)


def _reaches(path: Path | None, reach: str) -> bool:
    return path is not None and path.rank <= PATHS.index(reach)


def domains(host: Host) -> tuple[tuple[int, ...], ...]:
    """The islands; without direct connections, the widest PCIe groups that still divide the host."""
    found = islands(host)
    if any(len(island.gpus) > 1 for island in found):
        return tuple(island.gpus for island in found)
    levels = (pcie_groups(host, reach) for reach in ("NODE", "PHB", "PXB", "PIX"))
    return next((groups for groups in levels if len(groups) > 1), tuple(island.gpus for island in found))


def nearest_nics(host: Host) -> tuple[Nearest, ...]:
    """For each GPU the NICs at its closest path; PXN where the NIC is behind the CPU and a peer sits beside one.

    NCCL sends through a peer on NVLink whose NIC is within PXB of it (GPUDirect's default reach without C2C).
    """
    own = tuple(_closest(host, gpu, host.nics) for gpu in range(len(host.gpus)))
    peers = {gpu: island.gpus for island in islands(host) for gpu in island.gpus}
    return tuple(_with_peer(one, own, peers[one.gpu]) for one in own)


@lru_cache(maxsize=8)
def gpu_paths(host: Host) -> Mapping[tuple[int, int], str]:
    """How NCCL sends between each pair of GPUs whose path is known, by its defaults.

    cable: NVLink or xGMI; relay: over a GPU joined to both; peer: PCIe, directly; memory: through the host's.
    """
    anywhere = host.cpu == "amd" and len(host.gpus) <= _AMD_PAIR
    direct: dict[int, set[int]] = {gpu: set() for gpu in range(len(host.gpus))}
    for i, j, path in _known(host):
        if path.is_direct:
            direct[i].add(j)
            direct[j].add(i)
    found = {}
    for i, j, path in _known(host):
        near = "peer" if anywhere or _is_near(path) else "memory"
        found[i, j] = "cable" if path.is_direct else "relay" if direct[i] & direct[j] else near
    return found


def idle_nics(host: Host) -> tuple[str, ...]:
    """NICs that no GPU is nearest to by a path within the PCIe tree: storage and management, usually."""
    used = {name for one in nearest_nics(host) for name in one.nics}
    within = {c.name for c in host.nics for g in host.gpus if _is_near(host.path(g.name, c.name))}
    return tuple(c.name for c in host.nics if c.name not in used and c.name not in within)


def _closest(host: Host, gpu: int, nics: tuple[Nic, ...]) -> Nearest:
    paths = {nic.name: path for nic in nics if (path := host.path(host.gpus[gpu].name, nic.name)) is not None}
    if not paths:
        return Nearest(gpu=gpu, nics=(), path=None)
    best = min(paths.values(), key=lambda path: path.rank)
    return Nearest(gpu=gpu, nics=tuple(name for name, path in paths.items() if path.rank == best.rank), path=best)


def _with_peer(one: Nearest, own: tuple[Nearest, ...], peers: tuple[int, ...]) -> Nearest:
    if one.path is None or _is_near(one.path):
        return one
    beside = [own[peer] for peer in peers if _is_near(own[peer].path)]
    if not beside:
        return one
    # peers take turns, so that GPUs without a NIC of their own do not all pass through one
    chosen = beside[peers.index(one.gpu) % len(beside)]
    return Nearest(gpu=one.gpu, nics=chosen.nics, path=chosen.path, via=chosen.gpu)


def _is_near(path: Path | None) -> bool:
    """NCCL's reach of GPUDirect RDMA and PXN: PCIe switches, and C2C to the GPU's own CPU."""
    return path is not None and path.kind in ("PIX", "PXB", "P2C")
