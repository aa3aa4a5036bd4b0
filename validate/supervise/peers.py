"""What parents of ranks agree on where a launcher started them one by one: whose trouble it was, and what comes next.

Rank 0's parent listens; each parent, itself included, connects to it and says JSON lines. A parent that is gone without a
goodbye (its node was lost, the system killed it) is a trouble of its rank, told to the others at once.
No torch in here: a store of torch's is gone with the processes whose end is to be told.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import select
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from validate.supervise.verdict import PRIORITY, Verdict, cause_of

_PORTS: Final = (20_000, 12_000)  # below the ephemeral ones: the first, and how many
_TRIES: Final = 8  # ports that are tried, in an order that every rank knows
_LINE_BYTES: Final = 1 << 20
_TICK_S: Final = 0.05
_AGAIN_S: Final = 0.1
_HELLO_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceInJob:
    """Who comes: a rank of `size` on `host`; where rank 0's parent is found; a key that tells this job from others."""

    rank: int
    size: int
    host: str
    address: str
    port: int
    key: str = ""

    @property
    def token(self) -> str:
        return hashlib.sha256(f"{self.key} {self.address} {self.port} {self.size}".encode()).hexdigest()[:24]

    @property
    def ports(self) -> list[int]:
        first, count = _PORTS
        return [first + (self.port * 31 + attempt * 997) % count for attempt in range(_TRIES)]


@dataclass(slots=True)
class Peers:
    """A parent's side. Raises nothing once it has begun: a peer that is lost is an answer."""

    place: PlaceInJob
    patience_s: float = 120.0
    troubles: list[Verdict] = field(default_factory=list)  # of other ranks
    _socket: socket.socket | None = None
    _coordinator: _Coordinator | None = None
    _pending: bytes = b""
    _answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    _has_reported: bool = False
    _first_host: str = ""  # rank 0's

    def begin(self) -> None:
        """Listen, if this is rank 0's, and connect. Without a connection this rank is alone, and says so in `troubles`."""
        if self.place.rank == 0:
            self._coordinator = _Coordinator(self.place)
        until = time.monotonic() + self.patience_s
        while self._socket is None and time.monotonic() < until:
            for port in self.place.ports:
                if self._connect(port):
                    return
            time.sleep(_AGAIN_S)
        self._lose_coordinator(f"not reached at {self.place.address} within {self.patience_s:g} s")

    def _connect(self, port: int) -> bool:
        try:
            self._socket = socket.create_connection((self.place.address, port), timeout=_HELLO_S)
        except OSError:
            return False
        self._send(hello=self.place.token, rank=self.place.rank, host=self.place.host)
        self._receive(_HELLO_S)
        if self._answers.pop("welcome", None) is not None:
            return True
        if self._socket is not None:
            self._socket.close()
        self._socket, self._pending = None, b""
        self.troubles.clear()
        return False

    # -- what ranks tell each other ------------------------------------------------------------------------------

    def own(self, verdict: Verdict) -> Verdict:
        """A verdict over the rank started here, under the rank's and the host's real names."""
        return replace(verdict, rank=self.place.rank, host=self.place.host)

    def tell(self, verdict: Verdict) -> None:
        """This rank is in trouble; the others hear it at once. Once is enough."""
        if not self._has_reported:
            self._has_reported = True
            self._send(trouble=asdict(self.own(verdict)))

    def elsewhere(self) -> list[Verdict]:
        """Troubles of other ranks until now."""
        self._receive(0.0)
        return self.troubles

    def gather(self, name: str, mine: Mapping[str, Any], patience_s: float | None = None) -> dict[int, dict[str, Any]]:
        """What every rank says under this name; who is lost or silent is missing. The same for all that are there."""
        patience_s = self.patience_s if patience_s is None else patience_s
        self._send(at=name, said=dict(mine), patience_s=patience_s)
        until = time.monotonic() + patience_s + _HELLO_S
        while self._socket is not None and name not in self._answers and time.monotonic() < until:
            self._receive(_TICK_S)
        answer = self._answers.pop(name, None)
        return {int(rank): value for rank, value in answer.items()} if answer else {self.place.rank: dict(mine)}

    def settle(self, name: str, verdict: Verdict, patience_s: float = 15.0) -> Verdict:
        """One verdict for all ranks: the cause of every rank's. Of a rank that is gone the others say what they saw."""
        answers = self.gather(name, asdict(verdict), patience_s)
        verdicts = {rank: Verdict(**one) for rank, one in answers.items()}
        silent = [
            Verdict(kind="peer_lost", detail=f"its process said nothing for {patience_s:g} s", rank=rank)
            for rank in range(self.place.size)
            if rank not in verdicts and all(one.rank != rank for one in self.troubles)
        ]
        own = [one for rank, one in verdicts.items() if one.rank == rank and one.kind in PRIORITY]
        seen = [
            one for one in (*verdicts.values(), *self.troubles) if one.rank not in verdicts and one.kind in PRIORITY
        ]
        troubles = [*own, *seen, *silent] or [one for one in verdicts.values() if one.kind in PRIORITY]
        if troubles:
            return cause_of(troubles)
        return next((one for one in verdicts.values() if not one.ok), verdict)

    def forget(self) -> None:
        """Begin anew after a trouble that all have agreed on; ranks that are gone stay gone."""
        self._has_reported = False
        self.troubles = [trouble for trouble in self.troubles if trouble.kind == "killed" and not trouble.phase]

    def close(self) -> None:
        self._send(bye=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._coordinator is not None:
            self._coordinator.close()

    # -- lines ---------------------------------------------------------------------------------------------------

    def _send(self, **message: object) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall((json.dumps(message) + "\n").encode())
        except OSError as exc:
            self._lose_coordinator(str(exc.strerror or exc))

    def _receive(self, timeout_s: float) -> None:
        while self._socket is not None and select.select([self._socket], [], [], timeout_s)[0]:
            timeout_s = 0.0
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            if not data:
                self._lose_coordinator("the connection to its parent process is closed")
                return
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                self._take(_message(line))

    def _take(self, message: Mapping[str, Any]) -> None:
        if "welcome" in message:
            self._answers["welcome"], self._first_host = {}, str(message["welcome"])
        elif (trouble := _verdict(message.get("trouble"))) is not None:
            self.troubles.append(trouble)
        elif isinstance(message.get("at"), str) and isinstance(message.get("all"), dict):
            self._answers[message["at"]] = message["all"]

    def _lose_coordinator(self, why: str) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self.troubles.append(Verdict(kind="killed", detail=why, rank=0, host=self._first_host or self.place.address))


# --- rank 0's side


@dataclass(slots=True)
class _Peer:
    connection: socket.socket
    rank: int = -1
    host: str = ""
    pending: bytes = b""


@dataclass(slots=True)
class _Round:
    until_s: float
    answers: dict[int, Any] = field(default_factory=dict)


class _Coordinator:
    """Hears every parent, and tells all what each has said."""

    def __init__(self, place: PlaceInJob) -> None:
        self._place, self._peers, self._rounds = place, list[_Peer](), dict[str, _Round]()
        self._lost: set[int] = set()
        self._selector, self._stop = selectors.DefaultSelector(), threading.Event()
        self._listener = _listener(place)
        if self._listener is not None:
            self._listener.settimeout(0.0)
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self, patience_s: float = 2.0) -> None:
        """Wait for the others' goodbyes a moment: a port closed before they have read is a trouble that is none."""
        until = time.monotonic() + patience_s
        while self._peers and time.monotonic() < until:
            time.sleep(_TICK_S)
        self._stop.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # a socket
        self._selector.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(_TICK_S):
                if key.data is None:
                    self._accept()
                else:
                    self._receive(key.data)
            for name in [name for name, one in self._rounds.items() if self._done(one)]:
                answers = self._rounds.pop(name).answers
                self._tell_all(at=name, all={str(rank): value for rank, value in sorted(answers.items())})

    def _done(self, one: _Round) -> bool:
        return time.monotonic() >= one.until_s or len(one.answers.keys() | self._lost) >= self._place.size

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.settimeout(_HELLO_S)
            self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(65536)
        except OSError:
            data = b""
        *lines, peer.pending = (peer.pending + data).split(b"\n")
        if not all(self._take(peer, _message(line)) for line in lines) or not data or len(peer.pending) > _LINE_BYTES:
            self._part(peer)

    def _take(self, peer: _Peer, message: Mapping[str, Any]) -> bool:
        """Whether the peer stays."""
        if peer.rank < 0:
            rank = message.get("rank")
            if message.get("hello") != self._place.token or not isinstance(rank, int):
                return False
            peer.rank, peer.host = rank, str(message.get("host", ""))
            self._peers.append(peer)
            _send(peer, welcome=self._place.host)
        elif "trouble" in message:
            self._tell_all(but=peer, trouble=message["trouble"])
        elif "at" in message:
            until = time.monotonic() + float(message.get("patience_s", 0.0))
            self._rounds.setdefault(str(message["at"]), _Round(until)).answers[peer.rank] = message.get("said")
        elif "bye" in message:
            self._lost.add(peer.rank)
            peer.rank = -1
            return False
        return True

    def _part(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._peers = [other for other in self._peers if other is not peer]
        if peer.rank >= 0:
            self._lost.add(peer.rank)
            detail = "its process is gone: the node was lost, or the system or somebody killed it"
            self._tell_all(trouble=asdict(Verdict(kind="killed", detail=detail, rank=peer.rank, host=peer.host)))

    def _tell_all(self, *, but: _Peer | None = None, **message: object) -> None:
        for peer in [other for other in self._peers if other is not but]:
            _send(peer, **message)


def _send(peer: _Peer, **message: object) -> None:
    with contextlib.suppress(OSError):  # who is gone is noticed where it is read from
        peer.connection.sendall((json.dumps(message) + "\n").encode())


def _listener(place: PlaceInJob) -> socket.socket | None:
    """On the first of the place's ports that is free; None where none is."""
    local = place.address.startswith("127.") or place.address == "localhost"
    for port in place.ports:
        try:
            return socket.create_server(("127.0.0.1" if local else "", port), backlog=1024)
        except OSError:
            continue
    return None


def _message(line: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _verdict(data: object) -> Verdict | None:
    try:
        found = Verdict(**data) if isinstance(data, dict) else None
    except TypeError:
        return None
    return found if found is not None and found.kind in PRIORITY and isinstance(found.rank, int) else None
