"""Tensors one by one: assignments against exhaustive search, transfers against ports and room, tiers against strings by hand."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import pytest

from simulator.cli import main
from simulator.studies.tensors import POLICIES, Node, Tensor, Tiered, assign_shards, schedule_transfers, tiered
from simulator.work.offload.hierarchy import Tier
from simulator.work.offload.tiered import Moves

GB = 10**9


def tensor(name: str, num_bytes: int, *uses_s: float, gpu: int = 0) -> Tensor:
    return Tensor(name=name, gpu=gpu, num_bytes=num_bytes, uses_s=uses_s)


def node(*room: int, rate: float = 100 * GB) -> Node:
    pairs = [(a, b) for a in range(len(room)) for b in range(len(room)) if a != b]
    return Node(room=room, bytes_per_s=dict.fromkeys(pairs, rate))


def drawn(seed: int, count: int, gpus: int) -> tuple[list[Tensor], Node]:
    draw = random.Random(seed)  # noqa: S311  sizes, not secrets
    tensors = []
    for number in range(count):
        uses = sorted(draw.sample(range(10), draw.randint(1, 3)))
        tensors.append(tensor(f"t{number}", draw.randint(1, 9) * GB, *map(float, uses), gpu=draw.randrange(gpus)))
    pairs = {(a, b): draw.choice([50, 100, 200]) * float(GB) for a in range(gpus) for b in range(gpus) if a != b}
    return tensors, Node(room=tuple(draw.randint(8, 20) * GB for _ in range(gpus)), bytes_per_s=pairs)


def held(tensors: list[Tensor], holders: tuple[int, ...], gpu: int, moment: float) -> int:
    """Bytes on a GPU at a moment, counted anew."""
    return sum(
        t.num_bytes
        for t, at in zip(tensors, holders, strict=True)
        if at == gpu and t.uses_s[0] <= moment <= t.uses_s[-1]
    )


def legal(tensors: list[Tensor], holders: tuple[int, ...], on: Node) -> bool:
    return all(
        held(tensors, holders, gpu, moment) <= room
        for gpu, room in enumerate(on.room)
        for moment in {t.uses_s[0] for t in tensors}
    )


def road_s(tensors: list[Tensor], holders: tuple[int, ...], on: Node) -> float:
    return sum(
        0.0 if at == t.gpu else len(t.uses_s) * t.num_bytes / on.bytes_per_s[at, t.gpu]
        for t, at in zip(tensors, holders, strict=True)
    )


# -- assign_shards


def test_what_fits_at_home_stays_there() -> None:
    found = assign_shards([tensor("a", 3 * GB, 0, 2), tensor("b", 5 * GB, 1, 3)], node(8 * GB, 8 * GB))
    assert (found.holders, found.road_s, found.least_s, found.exact) == ((0, 0), 0.0, 0.0, True)


def test_the_tensor_that_is_used_least_leaves() -> None:
    """Room for one of two of 5 GB: used twice and three times; 2 × 5 GB at 100 GB/s."""
    found = assign_shards([tensor("a", 5 * GB, 0, 2, 4), tensor("b", 5 * GB, 1, 3)], node(8 * GB, 8 * GB))
    assert found.holders == (0, 1)
    assert found.road_s == pytest.approx(0.1)


def test_lives_that_do_not_meet_share_room() -> None:
    found = assign_shards([tensor("a", 5 * GB, 0, 1), tensor("b", 5 * GB, 2, 3)], node(5 * GB, 0))
    assert (found.holders, found.road_s) == ((0, 0), 0.0)


@pytest.mark.parametrize("seed", range(12))
def test_small_instances_are_solved_as_by_exhaustive_search(seed: int) -> None:
    tensors, on = drawn(seed, 6, 3)
    every = [one for one in product(range(3), repeat=6) if legal(tensors, one, on)]
    found = assign_shards(tensors, on)
    if not every:
        assert found.too_much
        return
    best_s = min(road_s(tensors, one, on) for one in every)
    assert found.exact
    assert legal(tensors, found.holders, on)
    assert found.road_s == pytest.approx(road_s(tensors, found.holders, on), abs=1e-15)
    assert found.road_s == pytest.approx(best_s, abs=1e-15)
    assert found.least_s <= best_s + 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_many_tensors_are_never_over_room_nor_below_the_bound(seed: int) -> None:
    tensors, on = drawn(100 + seed, 60, 4)
    on = Node(room=tuple(6 * one for one in on.room), bytes_per_s=on.bytes_per_s)
    found = assign_shards(tensors, on)
    assert not found.exact or not found.road_s
    assert bool(found.too_much) != legal(tensors, found.holders, on)
    assert found.too_much or found.least_s <= found.road_s + 1e-12


def test_what_finds_no_place_is_told() -> None:
    found = assign_shards([tensor("a", 9 * GB, 0, 1), tensor("b", 9 * GB, 0, 1)], node(10 * GB, 4 * GB))
    assert found.too_much == {0: 8 * GB}


# -- schedule_transfers


def test_a_use_is_copied_ahead_where_there_is_room_and_read_in_place_where_not() -> None:
    """b lies on GPU 1 and is used at 1 s and 4 s: made there in place; back by 1 + 5/100 s where a has left GPU 0 at 2 s, else late."""
    b = tensor("b", 5 * GB, 1, 4)
    for until, how, start_s, exposed_s in ((4.0, "read in place", 4.0, 0.05), (0.5, "copied ahead", 1.05, 0.0)):
        tensors, on = [tensor("a", 6 * GB, 0, until), b], node(10 * GB, 8 * GB)
        found = assign_shards(tensors, on) if until == 4 else None
        holders = (0, 1)
        assert found is None or found.holders in ((0, 1), (1, 0))
        placed = assign_shards([tensor("x", 1, 0)], on)
        forced = type(placed)(holders=holders, road_s=0.0, least_s=0.0, exact=True, too_much={})
        first, second = schedule_transfers(tensors, on, forced)
        assert (first.how, first.start_s) == ("read in place", 1.0)
        assert second.how == how
        assert second.start_s == pytest.approx(start_s)
        assert second.exposed_s == pytest.approx(exposed_s)


@pytest.mark.parametrize("seed", range(6))
def test_ports_carry_one_transfer_at_a_time_and_copies_have_room(seed: int) -> None:
    tensors, on = drawn(200 + seed, 14, 3)
    found = assign_shards(tensors, on)
    transfers = schedule_transfers(tensors, on, found)
    remote = [(t, at) for t, at in zip(tensors, found.holders, strict=True) if at != t.gpu]
    assert len(transfers) == sum(len(t.uses_s) for t, _ in remote)
    for end in ("source", "target"):
        for gpu in range(3):
            times = sorted((one.start_s, one.end_s) for one in transfers if getattr(one, end) == gpu)
            assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(times))
    for one in transfers:
        assert one.end_s - one.start_s == pytest.approx(one.num_bytes / on.bytes_per_s[one.source, one.target])
    if not found.too_much:
        for gpu, room in enumerate(on.room):
            for moment in {t.uses_s[0] for t in tensors} | {one.start_s for one in transfers}:
                copies = sum(
                    one.num_bytes
                    for one in transfers
                    if one.target == gpu and one.how == "copied ahead" and one.start_s <= moment <= one.used_s
                )
                assert held(tensors, found.holders, gpu, moment) + copies <= room


# -- tiers


def string(text: str, size: int = GB) -> list[Tensor]:
    """A reference string; all pages are used once more together at its end, so that none dies before."""
    uses: dict[str, list[float]] = {}
    for at, page in enumerate(text):
        uses.setdefault(page, []).append(float(at))
    return [tensor(page, size, *uses[page], float(len(text))) for page in sorted(uses)]


def tiers(frames: int, size: int = GB) -> list[Tier]:
    return [
        Tier(name="hbm", num_bytes=frames * size, read_bytes_per_s=3e12, write_bytes_per_s=3e12),
        Tier(name="host", num_bytes=1000 * GB, read_bytes_per_s=50e9, write_bytes_per_s=50e9),
    ]


BELADYS = "123412512345"  # Belady, Nelson and Shedler, CACM 12(6), 1969: FIFO is worse with four frames than with three


def fewest(text: str, frames: int) -> int:
    """Misses beyond the first use of each page when every eviction is chosen best, by trying all."""
    full = text + "".join(sorted(set(text)))

    @cache
    def least(at: int, there: frozenset[str]) -> int:
        if at == len(full):
            return 0
        page = full[at]
        if page in there:
            return least(at + 1, there)
        miss = page in full[:at]
        if len(there) < frames:
            return miss + least(at + 1, there | {page})
        return miss + min(least(at + 1, (there - {out}) | {page}) for out in there)

    return least(0, frozenset())


@pytest.mark.parametrize(("frames", "misses"), [(3, 10), (4, 8), (5, 0)])
def test_lru_on_beladys_string(frames: int, misses: int) -> None:
    """By hand: 10 and 8 faults in the string, 5 more at its end, less the first use of each of 5 pages; 5 frames hold all."""
    found = tiered(string(BELADYS), tiers(frames), "lru")
    assert found.misses == misses
    assert found.fetched.get("host", 0) == misses * GB
    assert found.waits_s == pytest.approx(misses / 50)


@pytest.mark.parametrize("text", [BELADYS, "abcdabcdabcd", "aabbccddabdc", "abcabdabeacd"])
@pytest.mark.parametrize("frames", [2, 3])
def test_belady_is_the_least_that_any_eviction_reaches(text: str, frames: int) -> None:
    least = fewest(text, frames)
    assert tiered(string(text), tiers(frames), "belady").misses == least
    assert tiered(string(text), tiers(frames), "lru").misses >= least
    assert tiered(string(text), tiers(frames), "cost").misses >= least


def some(seed: int) -> list[Tensor]:
    draw = random.Random(seed)  # noqa: S311  sizes, not secrets
    return [
        tensor(f"t{n}", draw.randint(1, 6) * GB, *map(float, sorted(draw.sample(range(40), draw.randint(2, 8)))))
        for n in range(12)
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_fits_moves_nothing(policy: str) -> None:
    found = tiered(some(1), tiers(72), policy)
    assert (found.misses, found.fetched, found.evicted, found.waits_s, found.over_bytes) == (0, {}, {}, 0.0, 0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_more_device_memory_never_waits_longer(policy: str, seed: int) -> None:
    def played(room: int) -> Tiered:
        three = [
            Tier(name="hbm", num_bytes=room * GB, read_bytes_per_s=3e12, write_bytes_per_s=3e12),
            Tier(name="peer", num_bytes=10 * GB, read_bytes_per_s=450e9, write_bytes_per_s=450e9),
            Tier(name="host", num_bytes=10**13, read_bytes_per_s=50e9, write_bytes_per_s=50e9),
        ]
        return tiered(some(seed), three, policy, Moves(unit_s=9e-6))

    found = [played(room) for room in range(6, 50, 2)]
    assert found[0].waits_s > 0
    for less, more in pairwise(found):
        assert more.waits_s <= less.waits_s + 1e-12
        assert more.peak_bytes["hbm"] <= 50 * GB
    for room, one in zip(range(6, 50, 2), found, strict=True):
        assert one.peak_bytes["hbm"] <= room * GB


def test_it_is_told_which_tensor_is_where_when() -> None:
    """Room for one of two pages that take turns: a leaves when b is made, and comes back when it is used, which sends b away."""
    a, b = tensor("a", GB, 0, 2), tensor("b", GB, 1, 3)
    told = tiered([a, b], tiers(1), "lru").changes
    assert told == (
        (1.0, "a", "hbm", "host"),
        (2.0, "a", "host", "hbm"),
        (2.0, "b", "hbm", "host"),
        (3.0, "b", "host", "hbm"),
    )


def test_page_faults_and_mappings_cost_their_number() -> None:
    """Two tensors of 7 GB take turns in 8 GB: 4 fetches. Pages of 2 GB: 4 faults each of 1 ms, with the bytes at 50 GB/s."""
    two, hbm = string("ababab", 7 * GB), tiers(1, 8 * GB)
    copies = tiered(two, hbm, "lru")
    faults = tiered(two, hbm, "lru", Moves(unit_bytes=2 * GB, unit_s=1e-3))
    assert copies.misses == faults.misses == 6  # two more at the end
    assert copies.waits_s == pytest.approx(6 * 7 / 50)
    assert faults.waits_s == pytest.approx(6 * (7 / 50 + 4 * 1e-3))
    ahead = tiered(two, hbm, "lru", Moves(ahead=True))
    assert ahead.waits_s + ahead.hidden_s == pytest.approx(copies.waits_s)
    assert ahead.hidden_s == pytest.approx(
        5 * 7 / 50
    )  # a second between uses hides each, but the last, at the same time as the one before


# -- the command


def test_a_table_is_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "tensors.csv"
    table.write_text("name,gpu,bytes,uses_s\nw,0,50GB,0 1 2\nx,0,40GB,0.5 1.5\ny,1,10GB,0 2\n")
    asked = ["place", "--tensors", str(table), "--cluster", "hgx-h100-8"]
    assert main([*asked, "--room", "80GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["road_s"] == pytest.approx(2 * 40 / 450)  # x, whose two uses are fewer, over NVLink 4 one way
    assert [one["how"] for one in found["transfers"]] == ["read in place", "read in place"]
    assert found["least_s"] == pytest.approx(2 * 10 / 450)  # of 90 GB 10 are too much
    assert main([*asked, "--room", "80GB"]) == 0
    assert "1 of them held by a peer" in capsys.readouterr().out
    assert main([*asked, "--room", "45GB"]) == 4
    assert "find no place" in capsys.readouterr().out


def test_a_plans_own_tensors_move_between_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "place",
        "--tensors",
        "own",
        "--model",
        "llama3.2-1b",
        "--cluster",
        "hgx-h100-8",
        "--seq-len",
        "1024",
        "--json",
    ]
    found = {}
    for room in ("2GiB", "79GiB"):
        assert main([*asked, "--room", room, "--evict", "lru"]) == 0
        found[room] = json.loads(capsys.readouterr().out)
    assert found["79GiB"]["fetched"] == {}
    assert found["2GiB"]["fetched"]["host"] > 0
    assert main(asked) == 0
    assert all(one["holder"] == one["gpu"] for one in json.loads(capsys.readouterr().out)["tensors"])


def test_stages_of_1f1b_keep_as_many_micro_batches_as_stages_follow(capsys: pytest.CaptureFixture[str]) -> None:
    """arXiv 2104.04473: stage s of p has p - s micro-batches in flight; so many of what a layer saves live at once."""
    asked = [
        "place",
        "--tensors",
        "own",
        "--model",
        "llama3.2-1b",
        "--cluster",
        "hgx-h100-8",
        "--seq-len",
        "512",
        "--json",
    ]
    plan = ["--pp", "4", "--dp-shard", "1", "--dp-replicate", "2", "--zero", "0", "--num-micro-batches", "6"]
    assert main([*asked, *plan]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    for stage in range(4):
        layer = f"gpu{2 * stage} layer{4 * stage + 1} "
        lives = [
            (one["from_s"], one["to_s"]) for one in tensors if one["name"].startswith(layer) and "saved" in one["name"]
        ]
        assert len(lives) == 6
        assert max(sum(begin <= at < end for begin, end in lives) for at, _ in lives) == 4 - stage


def test_every_fault_of_a_table_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "tensors.csv"
    table.write_text("name,gpu,bytes,uses_s\na,9,1GB,0 1\na,0,0,0\nb,0,1 potato,1 0\n,0,1GB,x\n")
    assert main(["place", "--tensors", str(table), "--cluster", "hgx-h100-8"]) == 3
    told = " ".join(capsys.readouterr().err.split())
    for words in (
        "line 2: gpu: is 9",
        "line 3: bytes",
        "line 4: bytes",
        "line 4: uses_s",
        "line 5: name: is blank",
        "line 5: uses_s",
    ):
        assert words in told, words


def test_options_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", "--room", "4GiB"]) == 2
    assert main(["place", "--tensors", "own", "--layers"]) == 2
    assert "--layers: of ranks" in capsys.readouterr().err
    assert main(["place", "--tensors", "own", "--moves", "fault", "--room", "4 apples"]) == 3
    told = capsys.readouterr().err
    assert "--moves" in told
    assert "--room" in told
