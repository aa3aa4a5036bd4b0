"""Waiting for torch's other threads."""

from __future__ import annotations

import hashlib
import sys
import threading
import time

import pytest

from validate.every_thread import wait_for_threads


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a fixed time is waited")
def test_a_thread_that_works_is_waited_for() -> None:
    """Work outside of Python's lock, as gloo's is: the thread has ended when the wait has."""
    asleep = threading.Event()
    ended: list[float] = []

    def work() -> None:
        rows = bytes(1 << 24)
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            hashlib.sha256(rows).digest()
        ended.append(time.monotonic())

    sleeper, worker = threading.Thread(target=asleep.wait), threading.Thread(target=work)
    sleeper.start()
    worker.start()
    wait_for_threads()
    assert ended
    asleep.set()
    sleeper.join()
    worker.join()
