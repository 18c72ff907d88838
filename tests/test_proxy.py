"""The prefill/decode router over real HTTP: stand-ins answer like two vLLM servers and record what they were asked."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from pdxfer.errors import MisuseError
from tests.conftest import require

aiohttp = require("aiohttp")
web = require("aiohttp.web")
from pdxfer.proxy import Proxy  # noqa: E402  (aiohttp is optional)

PATHS = ["/v1/completions", "/v1/chat/completions"]
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[4, 5, 6], [0, 0, 1]], "remote_host": "127.0.0.1", "x": None}
BODY = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 9, "temperature": 0.1}
REPLY = b'{ "choices":[{"text":"\\u00e9","logprobs":-1.50}],  "kv_transfer_params":null }\n'  # no encoder writes it so


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Upstream:
    """Somebody's server. ``answer`` says what it does with a POST; the rest is what it has seen."""

    def __init__(self, answer: Callable[..., Awaitable[Any]]) -> None:
        self.answer, self.url, self.healthy = answer, "", True
        self.headers: list[Any] = []
        self.bodies: list[bytes] = []
        self.asked, self.cancelled = asyncio.Event(), asyncio.Event()

    async def post(self, request: Any) -> Any:
        self.headers.append(request.headers)
        self.bodies.append(await request.read())
        self.asked.set()
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def get(self, request: Any) -> Any:
        if request.path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        return web.Response(body=self.url.encode(), headers={"Content-Type": "application/json"})

    @property
    def last(self) -> dict[str, Any]:
        return json.loads(self.bodies[-1])


@asynccontextmanager
async def serving(answer: Callable[..., Awaitable[Any]]) -> Any:
    upstream = Upstream(answer)
    app = web.Application()
    app.router.add_get("/{any:.*}", upstream.get)
    for path in PATHS:
        app.router.add_post(path, upstream.post)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstream.url = "http://{}:{}".format(*runner.addresses[0])
    try:
        yield upstream
    finally:
        await runner.cleanup()


@pytest.fixture
def dead() -> Iterator[str]:
    """An address that refuses connections for as long as the test runs: bound, and not listening."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


async def hands_over(request: Any) -> Any:
    return web.json_response({"choices": [{"text": "a"}], "kv_transfer_params": PARAMS})


async def keeps(request: Any) -> Any:
    return web.json_response({"choices": [{"text": "a"}], "kv_transfer_params": None})


async def replies(request: Any) -> Any:
    return web.Response(body=REPLY, headers={"Content-Type": "application/json; charset=utf-8"})


async def hangs(request: Any) -> Any:
    await asyncio.Event().wait()


async def begins(request: Any) -> Any:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    await asyncio.Event().wait()


async def begins_and_breaks(request: Any) -> Any:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    request.transport.close()
    return response


async def refuses(request: Any) -> Any:
    return web.Response(status=400, body=b'{"error": {"message":"too long"}}', content_type="application/problem+json")


async def redirects(request: Any) -> Any:
    return web.Response(status=307, headers={"Location": request.path})


async def babbles(request: Any) -> Any:
    return web.Response(body=b"[1, 2]")


@asynccontextmanager
async def pair(prefill: Callable[..., Any] = hands_over, decode: Callable[..., Any] = replies, **options: Any) -> Any:
    """A proxy between a client and two servers."""
    async with (
        serving(prefill) as first,
        serving(decode) as second,
        Proxy(prefill=[first.url], decode=[second.url], drain_s=0.01, **options) as proxy,
        aiohttp.ClientSession(proxy.url) as client,
    ):
        yield client, first, second


async def fault(response: Any, status: int) -> str:
    """The message of an error of the proxy's own, in the shape that OpenAI's clients read."""
    assert response.status == status
    error = (await response.json())["error"]
    assert error["code"] == status
    return str(error["message"])


@pytest.mark.parametrize("path", PATHS)
@on_loop
async def test_prefill_is_asked_for_one_token_and_decode_gets_what_it_handed_over(path: str) -> None:
    body = BODY | {"n": 1, "min_tokens": 4, "max_completion_tokens": 9, "stream_options": {"include_usage": True}}
    headers = {"Authorization": "Bearer secret", "X-Request-Id": "mine-1", "Cookie": "a=b"}
    async with pair() as (client, prefill, decode):
        async with client.post(path, json=body, headers=headers) as response:
            assert (response.status, await response.read()) == (200, REPLY)
            assert response.headers["Content-Type"] == "application/json; charset=utf-8"
            assert float(response.headers["x-pdxfer-prefill-ms"]) > 0
            assert response.headers["X-Request-Id"] == "mine-1"
        kept = {name: value for name, value in body.items() if name not in {"min_tokens", "stream_options"}}
        wish = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        wish |= {"do_remote_decode": True, "do_remote_prefill": False}
        one = {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}
        assert prefill.last == kept | one | {"kv_transfer_params": wish}
        assert decode.last == body | {"kv_transfer_params": PARAMS}
        for seen in (*prefill.headers, *decode.headers):
            assert (seen["Authorization"], seen["X-Request-Id"]) == ("Bearer secret", "mine-1")
            assert "Cookie" not in seen
    assert len(prefill.bodies) == len(decode.bodies) == 1


@on_loop
async def test_a_request_without_an_id_gets_one() -> None:
    async with pair() as (client, prefill, decode):
        ids = []
        for _ in range(2):
            async with client.post(PATHS[0], json=BODY) as response:
                ids.append(response.headers["X-Request-Id"])
    assert "max_completion_tokens" not in prefill.last
    assert ids == [seen["X-Request-Id"] for seen in prefill.headers] == [s["X-Request-Id"] for s in decode.headers]
    assert len({uuid.UUID(name) for name in ids}) == 2


@on_loop
async def test_a_stream_is_passed_on_as_it_comes() -> None:
    received = asyncio.Event()

    async def counts(request: Any) -> Any:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in (b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"):
            await response.write(chunk)
            await received.wait()  # the next is sent only after the client has this one
            received.clear()
        return response

    async with pair(decode=counts) as (client, prefill, decode):
        async with client.post(PATHS[0], json=BODY | {"stream": True}) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            chunks = []
            async for chunk in response.content.iter_any():
                chunks.append(chunk)
                received.set()
        assert chunks == [b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"]
        assert (prefill.last["stream"], decode.last["stream"]) == (False, True)


@pytest.mark.parametrize(("prefill", "decode"), [(hangs, replies), (hands_over, hangs), (hands_over, begins)])
@on_loop
async def test_a_client_that_goes_away_cancels_the_request_in_flight(prefill: Any, decode: Any) -> None:
    async with pair(prefill, decode) as (client, first, second):
        busy, idle = (first, second) if prefill is hangs else (second, first)
        task = asyncio.create_task(client.post(PATHS[0], json=BODY | {"stream": True}))
        if decode is begins:
            response = await task
            assert await response.content.readany() == b"data: 1\n\n"
            response.close()
        else:
            await busy.asked.wait()
            task.cancel()
        await busy.cancelled.wait()
        assert not idle.cancelled.is_set()
        assert second.asked.is_set() == (prefill is not hangs)


@pytest.mark.parametrize(
    ("prefill", "status", "kind", "body"),
    [(refuses, 400, "application/problem+json", b'{"error": {"message":"too long"}}'), (redirects, 307, None, b"")],
)
@on_loop
async def test_a_prefill_answer_other_than_200_is_the_client_s(
    prefill: Any, status: int, kind: Any, body: bytes
) -> None:
    async with pair(prefill) as (client, first, decode):
        async with client.post(PATHS[0], json=BODY, allow_redirects=False) as response:
            assert (response.status, await response.read()) == (status, body)
            assert response.headers["Content-Type"] == (kind or "application/octet-stream")
            assert "x-pdxfer-prefill-ms" not in response.headers
        assert (len(first.bodies), len(decode.bodies)) == (1, 0)


@pytest.mark.parametrize("prompt", ["short", [1, 2], ["one"], [[1, 2]]])
@on_loop
async def test_what_prefill_keeps_is_decoded_without_a_hand_off(prompt: Any) -> None:
    raw = json.dumps(BODY | {"prompt": prompt}, indent=1).encode()
    async with pair(keeps) as (client, prefill, decode):
        async with client.post(PATHS[0], data=raw) as response:
            assert await response.read() == REPLY
        assert len(prefill.bodies) == 1
        assert decode.bodies == [raw]


@pytest.mark.parametrize(
    "several",
    [{"n": 2}, {"n": "2"}, {"best_of": 3}, {"use_beam_search": True}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}],
)
@on_loop
async def test_several_sequences_go_straight_to_decode(several: dict[str, Any]) -> None:
    raw = json.dumps(BODY | several, indent=1).encode()
    async with pair() as (client, prefill, decode):
        async with client.post(PATHS[0], data=raw) as response:
            assert await response.read() == REPLY
            assert "x-pdxfer-prefill-ms" not in response.headers
        assert not prefill.bodies
        assert decode.bodies == [raw]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (json.dumps(BODY | {"kv_transfer_params": PARAMS}), "kv_transfer_params"),
        (json.dumps(BODY | {"kv_transfer_params": {}}), "kv_transfer_params"),
        ("[1]", "object"),
        ("{", "JSON"),
        ('"\udcff"', "JSON"),
        ("[" * 100_000, "JSON"),
    ],
    ids=["params", "no params", "list", "half", "no text", "deep"],
)
@on_loop
async def test_a_body_that_is_not_the_client_s_to_send_is_refused(raw: str, message: str) -> None:
    async with pair() as (client, prefill, decode):
        async with client.post(PATHS[0], data=raw.encode(errors="surrogateescape")) as response:
            assert message in await fault(response, 400)
        assert not prefill.bodies + decode.bodies


@on_loop
async def test_what_is_too_large_or_not_there_is_an_error_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdxfer.proxy.BODY_BYTES_MAX", 1000)
    async with pair() as (client, prefill, _):
        async with client.post(PATHS[0], json=BODY | {"prompt": "a" * 1000}) as response:
            assert "1000" in await fault(response, 413)
        async with client.post("/v1/embeddings", json=BODY) as response:
            assert "Not Found" in await fault(response, 404)
        async with client.get(PATHS[0]) as response:
            assert "Method Not Allowed" in await fault(response, 405)
        async with client.post(PATHS[0], json=BODY, headers={"Authorization": "Bearer \u00e9"}) as response:
            assert "ASCII" in await fault(response, 400)
        assert not prefill.bodies


@on_loop
async def test_a_dead_prefill_server_is_passed_over(dead: str) -> None:
    async with (
        serving(hands_over) as prefill,
        serving(replies) as decode,
        Proxy(prefill=[dead, prefill.url], decode=[decode.url]) as proxy,
        aiohttp.ClientSession(proxy.url) as client,
    ):
        for _ in range(3):
            async with client.post(PATHS[0], json=BODY) as response:
                assert await response.read() == REPLY
    assert len(prefill.bodies) == len(decode.bodies) == 3


@on_loop
async def test_dead_servers_are_named_with_their_phase(dead: str) -> None:
    async with serving(hands_over) as alive:
        for role, servers in (
            ("prefill", {"prefill": [dead, dead + "/"], "decode": [alive.url]}),
            ("decode", {"prefill": [alive.url], "decode": [dead]}),
        ):
            async with Proxy(**servers) as proxy, aiohttp.ClientSession(proxy.url) as client:
                async with client.post(PATHS[0], json=BODY, headers={"X-Request-Id": "mine-2"}) as response:
                    assert f"{role} server {dead} can't be reached" in await fault(response, 502)
                    assert response.headers["X-Request-Id"] == "mine-2"
                async with client.get("/v1/models") as response:
                    assert response.status == (502 if role == "decode" else 200)
    assert len(alive.bodies) == 1  # decode was asked once, after prefill; nobody was after a prefill that failed


@on_loop
async def test_a_server_found_dead_is_passed_over_for_a_while(dead: str) -> None:
    async with (
        serving(keeps) as alive,
        Proxy(prefill=[alive.url], decode=[dead, alive.url]) as proxy,
        aiohttp.ClientSession(proxy.url) as client,
    ):
        statuses = []
        for _ in range(3):
            async with client.post(PATHS[0], json=BODY) as response:
                statuses.append(response.status)
        assert statuses == [502, 200, 200]


@on_loop
async def test_servers_take_turns() -> None:
    async with (
        serving(hands_over) as one,
        serving(hands_over) as two,
        serving(replies) as three,
        serving(replies) as four,
        Proxy(prefill=[one.url, two.url], decode=[three.url, four.url]) as proxy,
        aiohttp.ClientSession(proxy.url) as client,
    ):
        for _ in range(4):
            async with client.post(PATHS[0], json=BODY) as response:
                assert response.status == 200
        assert [len(server.bodies) for server in (one, two, three, four)] == [2, 2, 2, 2]


@on_loop
async def test_a_prefill_answer_that_can_t_be_read_is_its_server_s_fault() -> None:
    async with pair(babbles) as (client, prefill, decode):
        async with client.post(PATHS[0], json=BODY) as response:
            assert f"prefill server {prefill.url} answered" in await fault(response, 502)
        assert not decode.bodies


@on_loop
async def test_a_request_that_a_prefill_server_may_have_begun_is_not_repeated() -> None:
    async with (
        serving(begins_and_breaks) as one,
        serving(begins_and_breaks) as two,
        Proxy(prefill=[one.url, two.url], decode=[one.url]) as proxy,
        aiohttp.ClientSession(proxy.url) as client,
    ):
        async with client.post(PATHS[0], json=BODY) as response:
            assert f"prefill server {one.url} failed" in await fault(response, 502)
        assert (len(one.bodies), len(two.bodies)) == (1, 0)


@pytest.mark.parametrize(("prefill", "decode"), [(hangs, replies), (hands_over, hangs)])
@on_loop
async def test_a_silent_server_is_given_up(prefill: Any, decode: Any) -> None:
    async with pair(prefill, decode, timeout_s=0.2) as (client, first, second):
        silent = first if prefill is hangs else second
        async with client.post(PATHS[0], json=BODY) as response:
            assert f"server {silent.url} was silent" in await fault(response, 504)
        await silent.cancelled.wait()


@on_loop
async def test_an_answer_that_breaks_off_does_not_look_whole() -> None:
    async with (
        pair(decode=begins_and_breaks) as (client, _, _),
        client.post(PATHS[0], json=BODY | {"stream": True}) as response,
    ):
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


@on_loop
async def test_health_wants_one_server_of_each_role(dead: str) -> None:
    async with (
        serving(hands_over) as prefill,
        serving(replies) as decode,
        Proxy(prefill=[dead, prefill.url], decode=[decode.url]) as proxy,
        aiohttp.ClientSession(proxy.url) as client,
    ):
        async with client.get("/health") as response:
            report = await response.json()
            assert (response.status, report["decode"]) == (200, {decode.url: "ok"})
            assert report["prefill"][prefill.url] == "ok"
            assert "onnect" in report["prefill"][dead]
        prefill.healthy = False
        async with client.get("/health") as response:
            assert (response.status, (await response.json())["prefill"][prefill.url]) == (503, "status 503")
        async with client.get("/v1/models") as response:
            assert await response.text() == decode.url


@on_loop
async def test_leaving_the_context_cancels_what_does_not_end() -> None:
    async with serving(hangs) as prefill, aiohttp.ClientSession() as client:
        async with Proxy(prefill=[prefill.url], decode=[prefill.url], drain_s=0.01) as proxy:
            task = asyncio.create_task(client.post(proxy.url + PATHS[0], json=BODY))
            await prefill.asked.wait()
        await prefill.cancelled.wait()
        with pytest.raises(aiohttp.ClientError):
            await task


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:80", "https://h:1", "http://h", "http://h:0", "http://h:65536", "http://h:1/v1", "http://a@h:1"],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    for servers in ({"prefill": [url], "decode": ["http://h:1"]}, {"prefill": ["http://[::1]:1/"], "decode": [url]}):
        with pytest.raises(MisuseError, match="no address") as caught:
            Proxy(**servers)
        assert "http://127.0.0.1:" in caught.value.hint


def start(*argv: str, ask: str = "http://127.0.0.1:1") -> subprocess.Popen[str]:
    """``pdxfer proxy`` as a process, before two roles of one server."""
    command = [sys.executable, "-m", "pdxfer", "proxy", "--prefill", ask, "--decode", ask, *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@on_loop
async def test_a_signal_ends_the_command_after_its_requests(number: signal.Signals) -> None:
    release = asyncio.Event()

    async def waits(request: Any) -> Any:
        await release.wait()
        return await keeps(request)

    async with serving(waits) as server, aiohttp.ClientSession() as client:
        with start("--listen", "127.0.0.1:0", "--json", ask=server.url) as process:
            assert process.stdout
            url = json.loads(await asyncio.to_thread(process.stdout.readline))["listen"]
            task = asyncio.create_task(client.post(url + PATHS[1], json=BODY, headers={"X-Request-Id": "mine-3"}))
            await server.asked.wait()
            process.send_signal(number)
            while await asyncio.to_thread(accepts, url):
                pass
            release.set()
            async with await task as response:
                assert response.status == 200
            out, err = await asyncio.to_thread(process.communicate)
        assert (process.returncode, out) == (0, "")
        line = r".* INFO mine-3 /v1/chat/completions: 200 \(prefill [\d.]+ ms, decode first byte [\d.]+ ms\)\n"
        assert re.fullmatch(line, err)


def accepts(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/nothing").close()
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False
    raise AssertionError("there is no such path")


def test_the_command_warns_beyond_loopback() -> None:
    with start("--listen", "0.0.0.0:0") as process:
        assert process.stdout
        assert re.fullmatch(r"listening on http://0\.0\.0\.0:\d+\n", process.stdout.readline())
        process.terminate()
        _, err = process.communicate()
    assert process.returncode == 0
    assert re.fullmatch(r".* WARNING 0\.0\.0\.0 is no loopback address, and the proxy has no authentication\n", err)


@pytest.mark.parametrize("listen", ["8000", ":8000", "127.0.0.1", "http://127.0.0.1:0", "127.0.0.1:x", "no.invalid:0"])
def test_the_command_refuses_what_it_can_t_listen_on(listen: str) -> None:
    with start("--listen", listen) as process:
        out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err.startswith("error: ")
    assert "hint: " in err


def test_the_command_names_an_address_that_is_taken() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with start("--listen", f"127.0.0.1:{taken.getsockname()[1]}") as process:
            _, err = process.communicate()
    assert process.returncode == 2
    assert "address already in use" in err
