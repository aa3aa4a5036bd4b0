"""Mutations: of bytes, of lines and words, of the values of JSON, of what lies inside a gzip file, and of a command line."""

from __future__ import annotations

import gzip
import json
import random
import re
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, Final

import click

from simulator.cli import WRITES, shardwise
from tests.campaign.seeds import Seed
from tests.campaign.values import drawn_command, plausible

# Words that a file or a flag may hold and no reader expects: numbers at the ends of every range, other kinds of number,
# names that escape a folder or a terminal, text in no single encoding.
HOSTILE: Final[tuple[str, ...]] = (
    "", "0", "-1", "1", "2", "3", "7", "1e309", "-1e309", "nan", "NaN", "inf", "-Infinity", "1e-320", "0.1", "0.999999999", "65536", "1000000", "2147483647", "1e15", "1e-15", "9" * 25, "-" + "9" * 400, "1" + "0" * 5000,
    "0x10", "1_000", "٣", "½", "true", "null", "None", "[]", "{}", "[[[]]]", "''", '"', "\\", "../../../../../../../../dev/null/passwd", "/dev/full", "/dev/zero", ".", "-", "--", "--help",
    "a" * 300, "a" * 70_000, "\0", "\x1b[31mred\x1b[0m", "\x07", "\r\n", "\u202eabc", "😀", "\ud800".encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
    "1GB", "1GiB", "-5GB/s", "1e400GB/s", "us", "4294967296", "18446744073709551616", "$(reboot)", "${X}", "`id`", "; rm x", "%s%n", "{0.__class__}", "0-99999999999", "1,2,,3", "=", "a=b=c", "*",
)  # fmt: skip
WORD = re.compile(rb"[\w.+-]+|\"[^\"\n]*\"")
NESTED: Final = 3000


# What may stand in place of a file; the names of two devices among them
SPECIAL: Final = ("pipe", "folder", "loop", "missing", "/dev/zero", "/dev/full", "/proc/self/mem")
NAMES: Final = (
    "a b",
    "-x",
    "--json",
    "e\x1b[31m",
    "bell\x07",
    "ü😀",
    "\u202eabc",
    "'",
    '"',
    "$(id)",
    "{0}",
    "%s",
    "[red]",
    "a\nb",
    "c" * 200,
    "#",
    "a=b",
    "~",
)
LARGE: Final = 6 * 2**20  # bytes


def mutated(seed: Seed, rng: random.Random) -> Seed:
    """The seed with one to four faults in its files or its command line; the same random state gives the same."""
    argv, files = list(seed.argv), dict(seed.files)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        if seed.targets and rng.random() < 0.7:
            name = rng.choice(seed.targets)
            files[name] = _data(files[name], name, rng)
        else:
            argv = _argv(argv, rng)
    changed = replace(seed, argv=tuple(argv), files=files, valid=False)
    return _surrounded(changed, rng) if seed.targets and rng.random() < 0.04 else changed


def drawn(rng: random.Random) -> Seed:
    """A command of many options at once, each with a value that it takes, seldom a hostile one."""
    argv = drawn_command(rng)
    options = [one for one in options_of(argv) if not set(one.opts) & LEFT_OUT]
    for one in rng.sample(options, rng.choice((0, 0, 0, 1, 3))):
        value = rng.choice(HOSTILE).replace("\0", "") if rng.random() < 0.05 else plausible(one, rng)
        argv += [one.opts[-1]] if one.is_flag else [one.opts[-1], value]
    return Seed(name="drawn", argv=tuple(argv), valid=False)


def _surrounded(seed: Seed, rng: random.Random) -> Seed:
    """One of its files bears another name, is very large, or is none."""
    name, how = rng.choice(seed.targets), rng.choice((0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3))
    outputs = [one.opts[-1] for one in options_of(seed.argv) if set(one.opts) & WRITES]
    if how == 3 and outputs:
        return replace(seed, special={name: "kept"}, argv=(*seed.argv, rng.choice(outputs), name))
    if how == 0:
        return replace(seed, special={name: rng.choice(SPECIAL)})
    if how == 1:
        return replace(seed, files={**seed.files, name: _large(seed.files[name], rng)})
    new = rng.choice(NAMES) + name.rpartition("/")[2]
    files = {(new if key == name else key): data for key, data in seed.files.items()}
    return replace(seed, files=files, argv=tuple(word.replace(name, new) for word in seed.argv), mutable=())


def _large(data: bytes, rng: random.Random) -> bytes:
    """One of its lines so often that the file is large, or its all, or what is inside."""
    with suppress(OSError, EOFError, zlib.error):
        inner = gzip.decompress(data)
        if inner:  # of nothing, nothing is inside without end
            return gzip.compress(_large(inner, rng), 1, mtime=0)
    lines = data.splitlines(keepends=True) or [b"x"]
    at = rng.randrange(len(lines))
    many = rng.choice((lines[at], data, b" ", b"[", b"\n", b"x = 1\n"))
    return b"".join(lines[:at]) + many * (LARGE // max(1, len(many))) + b"".join(lines[at:])


def _data(data: bytes, name: str, rng: random.Random) -> bytes:
    if name.endswith(".gz") and rng.random() < 0.7:
        try:
            inner = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            return _bytes(data, rng)
        return gzip.compress(_data(inner, name.removesuffix(".gz"), rng), mtime=0)
    if name.endswith(".journal") and rng.random() < 0.7:
        return _row(data, rng)
    if name.endswith((".json", ".jsonl")) and rng.random() < 0.6 and (found := _json(data, rng)) is not None:
        return found
    return rng.choice((_bytes, _words, _words, _words, _lines, _lines))(data, rng)


def _row(data: bytes, rng: random.Random) -> bytes:
    """A journal with another outcome in one of its rows, whose sum is right: somebody meant it."""
    with closing(sqlite3.connect(":memory:")) as database:
        try:
            database.deserialize(data[:18] + b"\1\1" + data[20:])  # memory has no write-ahead log
            tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE sql LIKE '%sum %'")]
            rows = database.execute(f"SELECT key, outcome FROM {tables[0]} WHERE outcome IS NOT NULL").fetchall()  # noqa: S608
            key, text = rng.choice([row for row in rows if isinstance(row[1], str)])  # damage may have left other types
            found = _json(text.encode(), rng) if rng.random() < 0.7 else None
            new = (found or _words(text.encode(), rng)).decode("utf-8", "replace")
            checksum = zlib.crc32(f"{key}\n{new}".encode("utf-8", "replace"))
            database.execute(f"UPDATE {tables[0]} SET outcome=?, sum=? WHERE key=?", (new, checksum, key))  # noqa: S608
            database.commit()
            return database.serialize()
        except (sqlite3.Error, IndexError, UnicodeError):
            return _bytes(data, rng)


# --- bytes


def _bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return rng.choice(_OF_BYTES)(data, at, rng)


def _flipped(data: bytes, at: int, rng: random.Random) -> bytes:
    at = min(at, len(data) - 1)
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :] if data else b"?"


def _repeated(data: bytes, at: int, rng: random.Random) -> bytes:
    end = min(len(data), at + rng.randrange(1, 200))
    return data[:at] + data[at:end] * rng.choice((2, 50)) + data[end:]


_OF_BYTES: Final[Sequence[Callable[[bytes, int, random.Random], bytes]]] = (
    _flipped,
    _repeated,
    lambda data, at, _: data[:at],
    lambda data, at, rng: data[:at] + rng.randbytes(rng.choice((1, 8, 200))) + data[at:],
    lambda data, _, rng: data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-8-sig", "utf-32"))),
    lambda *_: b"",
    lambda data, at, rng: data[:at] + b"\0" * rng.choice((1, 100)) + data[at:],
    lambda _, __, rng: rng.choice((b"[", b"{", b"(", b'{"a":', b"a.")) * NESTED,
)


def _words(data: bytes, rng: random.Random) -> bytes:
    """A number, a name or a string becomes something else."""
    found = list(WORD.finditer(data[: 2**20]))
    if not found:
        return _bytes(data, rng)
    one = rng.choice(found)
    new = rng.choice(HOSTILE).encode("utf-8", "replace") if rng.random() < 0.7 else rng.choice(found).group()
    if one.group().startswith(b'"') and rng.random() < 0.7:
        new = b'"' + new.strip(b'"') + b'"'
    return data[: one.start()] + new + data[one.end() :]


def _lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    how = rng.randrange(6)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(other, lines[at])
    elif how == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif how == 3:
        lines[at] += rng.choice((b",", b" ;|&<>", b"\t", b"\\", b" #", b"'", b" = 1", b"[[x]]"))
    elif how == 4:
        lines[at:at] = [lines[at]] * rng.choice((3, 300))
    else:
        return b"\r\n".join(lines) if rng.random() < 0.5 else b"\n".join(lines[: at + 1])
    return b"\n".join(lines)


# --- the values of JSON


def _json(data: bytes, rng: random.Random) -> bytes | None:
    lines = data.splitlines() if data.count(b"\n{") else [data]
    at = rng.randrange(len(lines)) if lines else 0
    try:
        tree = json.loads(lines[at])
    except (ValueError, IndexError, RecursionError):
        return None
    lines[at] = json.dumps(_changed(tree, rng)).encode("utf-8", "replace")
    return b"\n".join(lines)


def _changed(tree: Any, rng: random.Random) -> Any:
    """One value of the tree, at a random depth, replaced, removed, renamed or given many times."""
    if tree and rng.random() < 0.85:
        if isinstance(tree, dict):
            return _changed_table(tree, rng.choice(list(tree)), rng)
        if isinstance(tree, list):
            return _changed_list(tree, rng.randrange(len(tree)), rng)
    return rng.choice(_OF_ANY_TYPE)(rng)


def _changed_table(tree: dict[str, Any], key: str, rng: random.Random) -> dict[str, Any]:
    how = rng.randrange(8)
    if how == 0:
        return {k: v for k, v in tree.items() if k != key}
    if how == 1:
        return {(rng.choice(HOSTILE) if k == key else k): v for k, v in tree.items()}
    return {**tree, key: _changed(tree[key], rng)}


def _changed_list(tree: list[Any], at: int, rng: random.Random) -> list[Any]:
    how = rng.randrange(6)
    if how == 0:
        return tree[:at] + tree[at + 1 :]
    if how == 1:
        return tree + [tree[at]] * rng.choice((1, 100))
    return [*tree[:at], _changed(tree[at], rng), *tree[at + 1 :]]


_OF_ANY_TYPE: Sequence[Callable[[random.Random], Any]] = (
    lambda rng: rng.choice(HOSTILE), lambda _: None, lambda _: True, lambda _: {}, lambda _: [], lambda _: -1, lambda _: 0, lambda _: 10**30, lambda _: 1e308,
    lambda _: 0.5, lambda _: [[[]]], lambda _: {"a": {"b": 1}}, lambda _: float("nan"), lambda _: float("inf"), lambda _: [None] * 50, lambda rng: rng.randrange(2**70), lambda _: 2**31,
)  # fmt: skip


# --- the command line


def _argv(argv: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(1, len(argv) + 1)
    how = rng.randrange(6)
    safe = [word.replace("\0", "") for word in HOSTILE]  # no program can be given a NUL
    if how == 0 and at < len(argv):
        return [*argv[:at], *argv[at + 1 :]]
    if how in (1, 2) and at < len(argv):
        return [*argv[:at], rng.choice(safe), *argv[at + 1 :]]
    if how == 3 and at < len(argv):
        return [*argv, argv[at]]
    return [*argv, *_option(argv, rng, safe)]


def _option(argv: list[str], rng: random.Random, safe: list[str]) -> list[str]:
    """One of the command's own options, with a hostile value or one of those that it takes."""
    options = [one for one in options_of(argv) if not set(one.opts) & LEFT_OUT]
    if not options:
        return []
    one = rng.choice(options)
    if one.is_flag:
        return [one.opts[-1]]
    return [one.opts[-1], plausible(one, rng) if rng.random() < 0.6 else rng.choice(safe)]


def options_of(argv: Sequence[str]) -> list[click.Option]:
    """The options of the command that the words name."""
    command: click.Command | None = shardwise
    for word in argv:
        if not isinstance(command, click.Group):
            break
        found = command.get_command(click.Context(command), word)
        command = found or command
    return [one for one in getattr(command, "params", []) if isinstance(one, click.Option)]


# Of these nothing is drawn: they start many processes, wait for ever, or are no question
LEFT_OUT: Final = frozenset(
    {"--help", "--jobs", "--dask", "--workers", "--scheduler", "--engine", "--watch", "--version", "--ranks"}
)
