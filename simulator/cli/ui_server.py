"""The server of `shardwise ui`: one browser on this machine, let in once by a token, and a handful of addresses.

It listens on 127.0.0.1 only. A request is answered if its Host is this server's (a page elsewhere that has its name point
here is not), if it carries the cookie that the token was exchanged for, and if, where it changes something, it comes from
our own page (Origin, and a JSON body, which no form can send).
"""

from __future__ import annotations

import hmac
import json
import secrets
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from typing_extensions import override

from simulator.base.errors import InputError
from simulator.cli.ui_runs import Runs, words
from simulator.formats.html import page

HOST: Final = "127.0.0.1"
MOST_BYTES: Final = 2**18  # of a request's body
_PATIENCE_S: Final = 30
_COOKIE: Final = "shardwise"
_ONCE: Final = "The address that shardwise printed opens this once, in one browser. Start shardwise ui again."
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Server(ThreadingHTTPServer):
    """Serves the live page. Raises OSError where the port is taken."""

    daemon_threads = True

    def __init__(self, runs: Runs, text: str, name: str, port: int) -> None:
        super().__init__((HOST, port), Handler)
        self.runs, self._token, self._session = runs, secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self.name = name
        self.front = page("live", {"name": name, "study": text}, {"words": words()})

    @property
    def hosts(self) -> tuple[str, str]:
        return f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"

    @property
    def address(self) -> str:
        """URL with the one-time token."""
        return f"http://{self.hosts[0]}/?token={self._token}"

    def let_in(self, token: str) -> str | None:
        """The session's cookie for the token, which is spent then."""
        if not self._token or not hmac.compare_digest(token.encode(), self._token.encode()):
            return None
        self._token = ""
        return self._session

    def knows(self, cookies: str) -> bool:
        """Whether a Cookie header has the session's."""
        values = (one.strip().partition("=") for one in cookies.split(";"))
        return any(
            name == _COOKIE and hmac.compare_digest(value.encode(), self._session.encode()) for name, _, value in values
        )

    def close(self) -> None:
        """Stop listening."""
        self.server_close()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnects during an answer."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    timeout = _PATIENCE_S
    server_version, sys_version = "shardwise", ""

    def do_GET(self) -> None:
        """Serve the front page, reports and runs."""
        if not self._is_ours():
            return
        url = urlsplit(self.path)
        token = parse_qs(url.query).get("token", [""])[0]
        if url.path == "/" and token:
            self._enter(token)
        elif not self.server.knows(self.headers.get("Cookie", "")):
            self._refuse(HTTPStatus.FORBIDDEN, _ONCE)
        elif url.path == "/":
            self._answer(HTTPStatus.OK, "text/html", self.server.front)
        elif url.path == "/runs":
            self._json(HTTPStatus.OK, self.server.runs.saved())
        elif url.path.startswith("/report/") and url.path.removeprefix("/report/").isdecimal() and len(url.path) < 20:
            self._report(int(url.path.removeprefix("/report/")))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such page.")

    def _report(self, number: int) -> None:
        found = self.server.runs.page(number)
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND, "This report is gone: predict again.")
        else:
            self._answer(HTTPStatus.OK, "text/html", found)

    def do_POST(self) -> None:
        """Predict a study, explore it, or save a run."""
        if not self._is_ours():
            return
        origins = tuple(f"http://{host}" for host in self.server.hosts)
        if not self.server.knows(self.headers.get("Cookie", "")) or self.headers.get("Origin") not in (None, *origins):
            self._refuse(HTTPStatus.FORBIDDEN, "Not from here.")
            return
        request = self._body()
        if request is None:
            return
        try:
            self._answer_request(request)
        except InputError as exc:  # the folder is full, or gone
            faults = [{"place": one.place, "problem": one.problem, "remedy": one.remedy} for one in exc.faults]
            self._json(HTTPStatus.OK, {"faults": faults})

    def _answer_request(self, request: dict[str, Any]) -> None:
        if self.path == "/predict":
            self._json(HTTPStatus.OK, self.server.runs.predicted(request["text"]))
        elif self.path == "/explore" and isinstance(request.get("vary"), str):
            self._json(HTTPStatus.OK, self.server.runs.explored(request["text"], request["vary"], self.server.name))
        elif self.path == "/keep" and isinstance(request.get("number"), int):
            saved = self.server.runs.keep(request["number"], request["text"])
            self._json(HTTPStatus.OK if saved else HTTPStatus.NOT_FOUND, saved or {"faults": []})
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such page.")

    def _is_ours(self) -> bool:
        if self.headers.get("Host") in self.server.hosts:
            return True
        self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "This is not the host that you asked for.")
        return False

    def _enter(self, token: str) -> None:
        session = self.server.let_in(token)
        if session is None:
            self._refuse(HTTPStatus.FORBIDDEN, "This address was opened before. Start shardwise ui again.")
            return
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", f"{_COOKIE}={session}; HttpOnly; SameSite=Strict; Path=/")
        self._close("text/plain", b"")

    def _body(self) -> dict[str, Any] | None:
        """The request's JSON with its `text`; None if invalid, which has been answered with an error."""
        length = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != "application/json" or not length.isdecimal():
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "JSON is read here.")
        elif len(length) > 9 or int(length) > MOST_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"At most {MOST_BYTES:,} bytes.")
        else:
            try:
                body = json.loads(self.rfile.read(int(length)))
            except (ValueError, RecursionError):
                body = None
            if isinstance(body, dict) and isinstance(body.get("text"), str):
                try:
                    body["text"].encode()
                except UnicodeEncodeError:  # half a surrogate pair
                    body["text"] = body["text"].encode(errors="replace").decode()
                return body
            self._refuse(HTTPStatus.BAD_REQUEST, "A JSON object with a text is expected.")
        return None

    def _json(self, status: HTTPStatus, data: object) -> None:
        self._answer(status, "application/json", json.dumps(data, ensure_ascii=False, allow_nan=False))

    def _refuse(self, status: HTTPStatus, words_: str) -> None:
        self.close_connection = True
        self._answer(status, "text/plain", words_ + "\n")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        self.send_response(status)
        self._close(kind, text.encode())

    def _close(self, kind: str, data: bytes) -> None:
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: addresses could hold the token."""
