"""A prefill/decode router for demos and tests: one OpenAI-compatible address in front of two kinds of server.

In come requests of OpenAI clients, out go the decode server's answers, unchanged. This file knows vLLM's convention
for handing a request over and nothing of what is handed over: ``kv_transfer_params`` is passed on unread.

::

    client ─── body ───▶ proxy ─── body, one token, do_remote_decode ───▶ prefill server
                           │ ◀────────── kv_transfer_params ──────────────┘
                           └─── body + kv_transfer_params ───▶ decode server ─── answer, as it comes ───▶ client

A request for several sequences (``n``, ``best_of``, beam search, several prompts) goes straight to decode: its prefill
answer could name the pages of one sequence only, and the others' would stay taken until their lease ends.

Every request lives in one task. A client that goes away cancels it, and with it the upstream request in flight, by
which engines notice. Nothing is kept of a request that has ended. There is no authentication: ``Authorization`` is
passed on, nothing is checked here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import SplitResult, urlsplit

import aiohttp
from aiohttp import web

from pdxfer.errors import DeadlineError, MisuseError, PdxferError, PeerError

__all__ = ["Proxy"]

_log = logging.getLogger(__name__)

BODY_BYTES_MAX = 64 << 20
CONNECT_S = 10.0
HEALTH_S = 5.0
DOWN_S = 5.0  # for which a server that couldn't be connected to is passed over
CLIENT_GONE = 499  # nginx's status for the log; nobody is there to receive it
STATUS = {MisuseError: 400, PeerError: 502, DeadlineError: 504}
ASK_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Proxy:
    """The router, as an async context manager: it listens inside ``async with`` and has ended after it.

    Args:
        prefill: prefill servers, ``http://host:port``, asked in turn.
        decode: decode servers, likewise.
        listen: ``host:port`` to bind; port 0 is a free one.
        timeout_s: for how long a server may send nothing before its request is given up.
        drain_s: for how long requests in flight may go on when the context is left; then they are cancelled.

    Raises MisuseError for an address that can't be read or bound. ``url`` is where clients connect to.
    """

    def __init__(
        self,
        *,
        prefill: Sequence[str],
        decode: Sequence[str],
        listen: str = "127.0.0.1:0",
        timeout_s: float = 600.0,
        drain_s: float = 5.0,
    ) -> None:
        self._prefill, self._decode = _Servers("prefill", prefill), _Servers("decode", decode)
        self._listen = _parse(f"http://{listen}", listen, "write 127.0.0.1:8000, [::1]:8000 or 127.0.0.1:0")
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=timeout_s)
        self._drain_s = drain_s
        self.url = ""

    async def __aenter__(self) -> Proxy:
        """Bind and begin to accept."""
        async with AsyncExitStack() as stack:
            self._session = await stack.enter_async_context(self._new_session())
            # aiohttp waits this long twice: for handlers to end, then for those it has told to.
            runner = web.AppRunner(
                self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=self._drain_s / 2
            )
            stack.push_async_callback(runner.cleanup)
            await runner.setup()
            try:
                await web.TCPSite(runner, self._listen.hostname, self._listen.port).start()
            except OSError as error:
                raise MisuseError(
                    f"can't listen on {self._listen.netloc}: {error}",
                    hint="choose another --listen; port 0 is a free one",
                ) from error
            host, port = runner.addresses[0][:2]
            self._stack = stack.pop_all()
        if not ipaddress.ip_address(host).is_loopback:
            _log.warning("%s is no loopback address, and the proxy has no authentication", host)
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop accepting, let requests end for a while, cancel the rest."""
        await self._stack.aclose()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_json_errors])
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        return app

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            # A connection per request: a kept one may be closed by its server just when a POST goes out.
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),  # clients share the session, not their cookies
            headers={"Accept-Encoding": "identity"},
            timeout=self._timeout,
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        call = _Call(request)
        try:
            response = await _guarded(self._route(call))
            call.status = response.status
        finally:
            call.log()
        if not response.prepared:
            response.headers.update(call.reply_headers)
        return response

    async def _route(self, call: _Call) -> web.StreamResponse:
        """Prefill, then decode; whichever fails first is what the client gets to see."""
        raw = await call.request.read()
        body = _parse_body(raw)
        if _is_one_sequence(body):
            began = time.monotonic()
            first = json.dumps(_prefill_body(body)).encode()
            async with self._ask(call, self._prefill, first, tries=2) as answer:
                if answer.status != 200:
                    return await self._relay(call, answer)
                params = _transfer_params(answer, await answer.read_all())
            call.prefilled((time.monotonic() - began) * 1e3)
            if params:
                raw = json.dumps({**body, "kv_transfer_params": params}).encode()
        async with self._ask(call, self._decode, raw) as answer:
            return await self._relay(call, answer)

    @asynccontextmanager
    async def _ask(
        self, call: _Call, servers: _Servers, body: bytes | None = None, tries: int = 1
    ) -> AsyncIterator[_Answer]:
        """Ask the next server of a role. Only one that couldn't be connected to has lost nothing: then one more."""
        for left in reversed(range(min(tries, len(servers.urls)))):
            url, began = servers.take(), time.monotonic()
            try:
                response = await self._session.request(
                    call.request.method,
                    url + call.request.path,
                    data=body,
                    headers=call.headers,
                    allow_redirects=False,
                )
                break
            except aiohttp.ClientError as error:
                refused = isinstance(error, aiohttp.ClientConnectorError)
                if refused:
                    servers.pass_over(url)
                if not (refused and left):
                    raise _blame(servers.role, url, error) from error
        async with response:
            yield _Answer(role=servers.role, url=url, began=began, response=response)

    async def _relay(self, call: _Call, answer: _Answer) -> web.StreamResponse:
        """Pass an answer on as it comes; a server that stops in the middle ends the client's connection too."""
        content_type = answer.response.headers.get("Content-Type", "application/octet-stream")
        out = web.StreamResponse(status=answer.status, headers={"Content-Type": content_type, **call.reply_headers})
        await out.prepare(call.request)
        try:
            chunk = await answer.read_some()
            call.notes.append(f"{answer.role} first byte {(time.monotonic() - answer.began) * 1e3:.1f} ms")
            while chunk:
                await out.write(chunk)
                chunk = await answer.read_some()
        except PdxferError as error:
            # The status has been sent: a body that ends before its end is all that can still be said.
            call.notes.append(error.message)
            if call.request.transport:
                call.request.transport.close()
        return out

    async def _models(self, request: web.Request) -> web.StreamResponse:
        call = _Call(request)
        async with self._ask(call, self._decode, tries=2) as answer:
            return await self._relay(call, answer)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        roles = (self._prefill, self._decode)
        states = await asyncio.gather(*(self._state(url) for role in roles for url in role.urls))
        found = iter(states)
        report = {role.role: {url: next(found) for url in role.urls} for role in roles}
        healthy = all("ok" in servers.values() for servers in report.values())
        return web.json_response(report, status=200 if healthy else 503)

    async def _state(self, url: str) -> str:
        try:
            async with self._session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_S)) as response:
                return "ok" if response.status == 200 else f"status {response.status}"
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            return str(error) or type(error).__name__


class _Servers:
    """The servers of one role, in turn; one that couldn't be connected to is passed over for ``DOWN_S``."""

    def __init__(self, role: str, addresses: Sequence[str]) -> None:
        if not addresses:
            raise MisuseError(f"there is no {role} server", hint=f"give at least one --{role} http://host:port")
        found = [_parse(url, url, f"write --{role} http://127.0.0.1:8100: no path, no user", 1) for url in addresses]
        self.role, self.urls = role, tuple(dict.fromkeys(f"http://{parts.netloc}" for parts in found))
        self._turn = deque(self.urls)
        self._down_until = dict.fromkeys(self.urls, 0.0)

    def take(self) -> str:
        now = time.monotonic()
        url = min(self._turn, key=lambda candidate: self._down_until[candidate] > now)  # the first that isn't down
        self._turn.remove(url)
        self._turn.append(url)
        return url

    def pass_over(self, url: str) -> None:
        self._down_until[url] = time.monotonic() + DOWN_S


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a server answers, with its name for whatever goes wrong while it is read."""

    role: str
    url: str
    began: float
    response: aiohttp.ClientResponse

    @property
    def status(self) -> int:
        return self.response.status

    async def read_some(self) -> bytes:
        """Return what has come, at least one byte, or b"" at the end."""
        try:
            return await self.response.content.readany()
        except aiohttp.ClientError as error:
            raise _blame(self.role, self.url, error) from error

    async def read_all(self) -> bytes:
        parts = []
        while part := await self.read_some():
            parts.append(part)
        return b"".join(parts)


class _Call:
    """One client's request: what goes back and onward with it, and what its log line will say."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.status = CLIENT_GONE
        self.notes: list[str] = []
        onward = ("Authorization", "X-Request-Id", "Traceparent", "Tracestate")
        self.headers = {name: request.headers[name] for name in onward if request.headers.get(name)}
        if not "".join(self.headers.values()).isascii():
            raise MisuseError(f"{' and '.join(self.headers)} must be ASCII")
        self.id = self.headers.setdefault("X-Request-Id", str(uuid.uuid4()))
        self.headers["Content-Type"] = "application/json"
        self.reply_headers = {"X-Request-Id": self.id}

    def prefilled(self, ms: float) -> None:
        self.reply_headers["X-Pdxfer-Prefill-Ms"] = f"{ms:.1f}"
        self.notes.append(f"prefill {ms:.1f} ms")

    def log(self) -> None:
        _log.info("%s %s: %d (%s)", self.id, self.request.path, self.status, ", ".join(self.notes))


def _parse(url: str, shown: str, hint: str, port_min: int = 0) -> SplitResult:
    """Split ``http://host:port``; raises MisuseError for more, less, or anything else."""
    try:
        parts = urlsplit(url)
        port = -1 if parts.port is None else parts.port
    except ValueError:
        port = -1
    if port < port_min or parts.geturl().rstrip("/") != f"http://{parts.netloc}" or not parts.hostname or "@" in url:
        raise MisuseError(f"{shown!r} is no address of a server", hint=hint)
    return parts


def _parse_body(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise MisuseError("the body is not a JSON object")
    if body.get("kv_transfer_params") is not None:
        raise MisuseError("kv_transfer_params is what this router sets; a client can't")
    return body


def _is_one_sequence(body: dict[str, Any]) -> bool:
    """Whether one prompt becomes one sequence; anything unclear counts as several, which is only slower."""
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    return (
        prompts == 1
        and all(body.get(name) in (None, 1) for name in ("n", "best_of"))
        and not body.get("use_beam_search")
    )


def _prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The client's body for prefill: one token, in one piece, and the wish to hand over."""
    kept = {name: value for name, value in body.items() if name not in ("min_tokens", "stream_options")}
    lengths = dict.fromkeys(("max_tokens", *({"max_completion_tokens"} & body.keys())), 1)
    return {**kept, **lengths, "stream": False, "kv_transfer_params": ASK_PREFILL}


def _transfer_params(answer: _Answer, raw: bytes) -> object:
    """Return what decode is to be told, or None when nothing is handed over (a prompt too short for it)."""
    try:
        return json.loads(raw).get("kv_transfer_params")
    except (ValueError, RecursionError, AttributeError) as error:
        raise PeerError(f"prefill server {answer.url} answered {len(raw)} bytes that are no JSON object") from error


def _blame(role: str, url: str, error: aiohttp.ClientError) -> PdxferError:
    """Turn what aiohttp raises into ours: who, and what."""
    what = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ServerTimeoutError):
        return DeadlineError(f"{role} server {url} was silent for too long: {what}")
    if isinstance(error, aiohttp.ClientConnectorError):
        return PeerError(f"{role} server {url} can't be reached: {error.strerror or what}")
    return PeerError(f"{role} server {url} failed: {what}")


def _error(status: int, kind: str, message: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
    )


async def _guarded(handling: Awaitable[web.StreamResponse]) -> web.StreamResponse:
    """What is raised, as the kind of error that OpenAI's clients read."""
    try:
        return await handling
    except web.HTTPException as error:  # no such path or method, body too large
        return _error(error.status, error.reason.upper().replace(" ", "_"), error.text or error.reason)
    except PdxferError as error:
        return _error(STATUS[type(error)], error.reason, error.message)


@web.middleware
async def _json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    return await _guarded(handler(request))
