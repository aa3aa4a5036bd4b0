"""Files are read where they are files and not too large, and written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from simulator.base.errors import InputError

_BESIDE: Final = ".unfinished"
_KEPT: Final = ("--folder", "--history")  # where a command reads what it has written itself
_read: set[tuple[int, int]] = set()  # files, by device and number


def forget_read() -> None:
    """Another command begins."""
    _read.clear()


def ordinary(path: Path, most_bytes: int | None = None) -> Path:
    """The path, if it is a regular file of at most that many bytes. Raises OSError, as pipes and devices may never end."""
    try:
        status = path.stat()
    except ValueError:  # a NUL, or half of a pair of surrogates, which Python's and JSON's strings may hold
        raise OSError(errno.EINVAL, "is no path") from None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is a pipe or a device; save it as a file", str(path))
    if most_bytes is not None and status.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"is larger than {most_bytes:,} bytes", str(path))
    _read.add((status.st_dev, status.st_ino))
    return path


def write_whole(path: Path, data: str | bytes | Iterable[bytes], flag: str = "") -> None:
    """Write the file, or its pieces, atomically, text as UTF-8. On failure the old file stays and InputError is raised, placed at `flag`.

    So it stays where the command has read it, because another file names it.
    """
    whole = data.encode() if isinstance(data, str) else data
    content = [whole] if isinstance(whole, bytes) else whole
    try:
        if path.exists() and not path.is_file():  # a pipe or a terminal has nothing to lose
            with path.open("wb") as file:
                file.writelines(content)
            return
        target = path.resolve()
        if flag and flag not in _KEPT and target.exists() and (target.stat().st_dev, target.stat().st_ino) in _read:
            raise InputError.at(f"{flag} {path}", "is also read", "another name")
        beside = target.with_name(f".{target.name}.{os.getpid()}{_BESIDE}")
        try:
            _remove_abandoned(target)
            with os.fdopen(owned_file(beside), "wb") as file:
                file.writelines(content)
                file.flush()
                os.fsync(file.fileno())  # or a machine that stops may keep the new name and not what it names
                beside.replace(target)  # while the file is owned
        finally:
            beside.unlink(missing_ok=True)
    except OSError as exc:
        place, problem = f"{flag} {path}".strip(), f"cannot be written: {exc.strerror or exc}"
        raise InputError.at(place, problem, "a path that can be written") from None


def _remove_abandoned(target: Path) -> None:
    """Remove unfinished files that killed processes left beside the target."""
    for one in target.parent.iterdir():
        if one.name.startswith(f".{target.name}.") and one.name.endswith(_BESIDE) and abandoned(one):
            one.unlink(missing_ok=True)


def owned_file(path: Path, mode: int = 0o666) -> int:
    """Open a new file that this process uses until it closes it, on this machine or another that shares the folder.

    It has its name only once it is locked: one that had it before could be taken for abandoned in between.
    """
    unnamed = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody takes the file for abandoned
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        unnamed.replace(path)
    except OSError:
        os.close(descriptor)
        unnamed.unlink(missing_ok=True)
        raise
    return descriptor


def abandoned(path: Path) -> bool:
    """Whether the process that owned the file has ended."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
