"""Admin: one process's state over HTTP, for probes, Prometheus, browsers and ``pdxfer status`` and its kin.

In come GETs (and POSTs for the few actions that an Observer has), out go JSON, text and one page.

==============================  =====================================================================
path                            answer
==============================  =====================================================================
``/``                           the status page
``/livez``                      200 as long as the process answers
``/readyz``, ``/readyz/CHECK``  200, or 503 with what is wrong, a line per check
``/metrics``                    Prometheus text (OpenMetrics where asked for)
``/statusz``                    agents, peers, readiness as JSON
``/transferz``, ``/transferz/ID``  timelines as JSON, newest first; ``?limit=``, ``?live=1``
``/configz``                    the config without secrets
``POST /ACTION``                what the Observer's ``actions`` has: ping, drain ...
==============================  =====================================================================

Nobody is authenticated, so everything is bound to loopback or to a private Unix socket. ``probes_only`` answers the
first four of the lower paths alone (livez, readyz, metrics) and may be bound to an address of the pod. A browser's
pages can't be made to ask for us: a Host that is no loopback name is refused, and so is a POST that carries an Origin.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from pdxfer.directory import clear_stale_socket, remove_socket
from pdxfer.errors import MisuseError, PdxferError

if TYPE_CHECKING:
    from pdxfer.observe.observer import Observer

__all__ = ["DEFAULT_ADMIN", "Admin", "host_and_port"]

DEFAULT_ADMIN = "127.0.0.1:9464"
_LIMIT, _LIMIT_MAX = 50, 1000
_IO_S = 5.0
_JSON, _TEXT = "application/json", "text/plain; charset=utf-8"
_CODES = {"NOT_FOUND": 404, "MISUSE": 400}
_PROBES = ("livez", "readyz", "metrics")
_log = logging.getLogger("pdxfer.admin")

_Answer = tuple[int, str, bytes]


class Admin:
    """Serves one Observer from construction until ``close``.

    Args:
        listen: ``HOST:PORT`` (port 0: a free one) or ``unix:///path``, which only our user can open.
        probes_only: answer probes and scrapes alone; then the host need not be loopback.

    Raises:
        MisuseError: the address is malformed, taken, or one that others can reach.
    """

    def __init__(self, observer: Observer, listen: str = DEFAULT_ADMIN, *, probes_only: bool = False) -> None:
        self._server = _server(observer, listen, probes_only)
        self._thread = threading.Thread(target=self._server.serve_forever, name="pdxfer-admin", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it is: ``http://HOST:PORT`` or ``unix:///path``."""
        return self._server.url

    def close(self) -> None:
        """Stop answering. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 32
    observer: Observer
    probes_only = False
    url = ""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, mostly."""
        _log.debug("an admin request failed", exc_info=True)


class _UnixServer(_Server):
    address_family = socket.AF_UNIX
    _inode = 0

    def server_bind(self) -> None:
        path = str(self.server_address)
        clear_stale_socket(path)
        before = os.umask(0o177)
        try:
            self.socket.bind(path)
        finally:
            os.umask(before)
        self._inode = os.stat(path).st_ino
        self.server_name, self.server_port = "localhost", 0

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, _ = self.socket.accept()
        return connection, ("unix", 0)

    def server_close(self) -> None:
        super().server_close()
        if self._inode:
            remove_socket(str(self.server_address), self._inode)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _server(observer: Observer, listen: str, probes_only: bool) -> _Server:
    kind: type[_Server] = _Server
    address: Any = listen[len("unix://") :]
    if listen.startswith("unix://"):
        kind = _UnixServer
    else:
        host, port = host_and_port(listen, probes_only=probes_only)
        kind, address = _Server6 if ":" in host else _Server, (host, port)
    try:
        server = kind(address, _Handler)
    except (OSError, OverflowError, MisuseError) as error:
        what = getattr(error, "message", "") or getattr(error, "strerror", "") or error
        raise MisuseError(f"the admin address {listen!r} can't be bound: {what}") from error
    server.observer, server.probes_only = observer, probes_only
    where = server.server_address
    shown = where[0] if ":" not in str(where[0]) else f"[{where[0]!s}]"
    server.url = listen if kind is _UnixServer else f"http://{shown!s}:{where[1]}"
    return server


def host_and_port(listen: str, *, probes_only: bool = False) -> tuple[str, int]:
    """The two parts of an admin's TCP address; raises MisuseError for none, and one that others could reach."""
    try:
        parts = urlsplit(f"//{listen}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if not host or port is None:
        raise MisuseError(f"the admin address {listen!r} is not HOST:PORT", hint="write HOST:PORT or unix:///path")
    if not probes_only and not _is_loopback(host):
        raise MisuseError(
            f"the admin address {listen!r} can be reached from other machines, and nobody is authenticated",
            hint="use 127.0.0.1; for scrapes and probes alone there is a second address, of metrics",
        )
    return host, port


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _IO_S
    server_version, sys_version = "pdxfer", ""

    def do_GET(self) -> None:
        """Answer one path of the table."""
        self._reply("GET")

    def do_HEAD(self) -> None:
        """The same without a body."""
        self._reply("GET")

    def do_POST(self) -> None:
        """Run one action."""
        self._reply("POST")

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every second: only for debugging."""
        _log.debug(format, *args)

    def _reply(self, method: str) -> None:
        try:
            code, kind, body = self._answer(method)
        except PdxferError as error:
            code = _CODES.get(error.reason, 500)
            code, kind, body = _json({"error": error.message, "reason": error.reason, "hint": error.hint}, code)
        except Exception as error:  # noqa: BLE001 - the last frame that is ours
            _log.exception("%s %s failed", method, self.path)
            code, kind, body = _json({"error": f"{type(error).__name__}", "reason": "INTERNAL", "hint": ""}, 500)
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if kind.startswith("text/html"):
            from pdxfer.observe.page import POLICY

            self.send_header("Content-Security-Policy", POLICY)
        if method == "POST":
            self.close_connection = True  # its body, which nobody wants, was not read
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _answer(self, method: str) -> _Answer:
        path, _, query = self.path.partition("?")
        name, _, rest = path.strip("/").partition("/")
        fields, observer = dict(parse_qsl(query)), self.server.observer
        host = urlsplit(f"//{self.headers.get('Host', 'localhost')}").hostname or ""
        if self.server.probes_only:
            if method != "GET" or name not in _PROBES:
                return _json({"error": "only probes and metrics are here", "reason": "NOT_FOUND", "hint": ""}, 404)
        elif not _is_loopback(host) or (method == "POST" and self.headers.get("Origin")):
            return _json({"error": "this is for this machine's own tools", "reason": "REFUSED", "hint": ""}, 403)
        if method == "POST":
            return _json(observer.act(name, fields))
        routes = {"": self._page, "livez": self._live, "readyz": self._ready, "metrics": self._metrics,
                  "statusz": self._status, "transferz": self._transfers, "configz": self._config}  # fmt: skip
        if name not in routes:
            raise MisuseError(f"there is no {path}", reason="NOT_FOUND", hint=" ".join(f"/{r}" for r in routes))
        return routes[name](observer, unquote(rest), fields)

    def _live(self, observer: Observer, rest: str, fields: Mapping[str, str]) -> _Answer:
        return 200, _TEXT, b"ok\n"

    def _ready(self, observer: Observer, rest: str, fields: Mapping[str, str]) -> _Answer:
        problems = observer.problems()
        if rest and rest not in problems:
            raise MisuseError(
                f"there is no check {rest!r}", reason="NOT_FOUND", hint=f"there are {', '.join(problems)}"
            )
        shown = {rest: problems[rest]} if rest else problems
        lines = [f"{'[-]' if why else '[+]'} {name} {why or 'ok'}" for name, why in shown.items()]
        return 503 if any(shown.values()) else 200, _TEXT, "\n".join([*lines, ""]).encode()

    def _metrics(self, observer: Observer, rest: str, fields: Mapping[str, str]) -> _Answer:
        body, kind = observer.metrics.expose(self.headers.get("Accept", ""))
        return 200, kind, body

    def _status(self, observer: Observer, rest: str, fields: Mapping[str, str]) -> _Answer:
        return _json(observer.status())

    def _transfers(self, observer: Observer, rest: str, fields: Mapping[str, str]) -> _Answer:
        found = observer.timelines()
        if rest:
            found = [t for t in found if t.transfer == rest]
            if not found:
                hint = "the last 512 of each rank are kept; pdxfer transfers lists them"
                raise MisuseError(f"no transfer {rest!r} is known here", reason="NOT_FOUND", hint=hint)
        if fields.get("live"):
            found = [t for t in found if not t.outcome]
        limit = fields.get("limit", str(_LIMIT))
        if not limit.isdecimal():
            raise MisuseError(f"limit is {limit!r}, not a number")
        shown = [t.to_json() for t in found[: min(int(limit), _LIMIT_MAX)]]
        return _json({"schema_version": 1, "known": len(found), "transfers": shown})

    def _config(self, observer: Observer, rest: str, fields: Mapping[str, str]) -> _Answer:
        return _json(observer.config())

    def _page(self, observer: Observer, rest: str, fields: Mapping[str, str]) -> _Answer:
        from pdxfer.observe.page import render

        return 200, "text/html; charset=utf-8", render(observer).encode()


def _json(value: Mapping[str, Any], code: int = 200) -> _Answer:
    return code, _JSON, json.dumps(value, indent=1).encode() + b"\n"
