"""The control plane as processes have it: deadlines, deaths, load, addresses, health, and what is left behind."""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from pdxfer.control import ControlClient, ControlServer
from pdxfer.control.convert import METHODS, SERVICE
from pdxfer.control.endpoint import MAX_MESSAGE_BYTES, SHARED_OPTIONS, Endpoint
from pdxfer.errors import (
    AbortedError,
    DeadlineError,
    ExhaustedError,
    MisuseError,
    PdxferError,
    PeerError,
)
from pdxfer.messages import (
    LIMITS,
    Completed,
)
from tests import controlled
from tests.controlled import (
    ANSWERS,
    COMPLETE,
    OPEN,
    WAIT_S,
    Handler,
    eventually,
    once_there,
    raw_channel,
    serving,
)

address, echo, socket_dir = controlled.address, controlled.echo, controlled.socket_dir

# Deadlines, deaths, load.


def test_the_client_gives_up_at_its_deadline(address: str) -> None:
    with serving(address) as (handler, _, client):
        handler.gate.clear()
        with pytest.raises(DeadlineError):
            client.complete(COMPLETE, 0.5)
        assert handler.seen.get(timeout=WAIT_S)[1] < 1.0  # gRPC rounds a deadline up a little.
        handler.gate.set()
        assert client.complete(COMPLETE) == ANSWERS["Complete"]


def test_timeouts_that_are_none(echo: tuple[Handler, list[ControlClient]]) -> None:
    handler, clients = echo
    with pytest.raises(DeadlineError):
        clients[0].complete(COMPLETE, 0.0)
    for timeout_s in (float("inf"), float("nan")):
        with pytest.raises(MisuseError):
            clients[0].complete(COMPLETE, timeout_s)
    assert handler.seen.empty()


def test_a_call_without_deadline_is_capped_and_cancelled(address: str) -> None:
    body = METHODS["Complete"].request.encode(COMPLETE)
    with serving(address, deadline_cap_s=0.25) as (handler, server, _), raw_channel(server) as channel:
        handler.gate.clear()
        call = channel.unary_unary(METHODS["Complete"].path)
        with pytest.raises(grpc.RpcError) as caught:
            call(body)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert handler.seen.get_nowait()[1] == 0.25
        handler.gate.set()
        call(body, timeout=WAIT_S)
        assert handler.seen.get_nowait()[1] == 0.25


def test_too_many_calls_at_once_are_refused_not_queued(address: str) -> None:
    outcomes: queue.Queue[object] = queue.Queue()

    def call(client: ControlClient) -> None:
        try:
            outcomes.put(client.complete(COMPLETE))
        except PdxferError as error:
            outcomes.put(error)

    with serving(address, max_workers=2) as (handler, _, client), ThreadPoolExecutor(12) as pool:
        handler.gate.clear()
        for _ in range(12):
            pool.submit(call, client)
        # Eight are running or waiting behind the gate, so the first four outcomes are the refusals.
        assert all(isinstance(outcomes.get(timeout=WAIT_S), ExhaustedError) for _ in range(4))
        handler.gate.set()
        assert [outcomes.get(timeout=WAIT_S) for _ in range(8)] == [ANSWERS["Complete"]] * 8


def test_one_client_serves_many_threads(echo: tuple[Handler, list[ControlClient]]) -> None:
    handler, clients = echo
    messages = [dataclasses.replace(COMPLETE, generation=i) for i in range(100)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda message: clients[message.generation % 2].complete(message), messages))
    assert answers == [ANSWERS["Complete"]] * 100
    assert sorted(handler.seen.get_nowait()[0].generation for _ in range(100)) == list(range(100))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nobody_there_is_a_peer_error_with_a_hint(socket_dir: str) -> None:
    for address in (f"unix://{socket_dir}/none.sock", f"tcp://127.0.0.1:{free_port()}"):
        with ControlClient(address, default_timeout_s=WAIT_S) as client:
            for call in (lambda: client.open(OPEN), lambda: client.complete(COMPLETE), client.health):
                with pytest.raises(PeerError) as caught:
                    call()
                assert caught.value.reason == "PEER_UNREACHABLE"
                assert caught.value.hint
                assert caught.value.details["peer"] == address


CHILD = """
import sys
from pdxfer.control import ControlServer
from tests.controlled import Handler
handler = Handler()
handler.gate.clear()
with ControlServer(handler, [sys.argv[1]]) as server:
    print(server.contact_addresses[0], flush=True)
    handler.seen.get()
    print("called", flush=True)
    handler.gate.wait()
"""


def test_a_server_killed_during_a_call_and_its_successor(address: str) -> None:
    root = Path(__file__).resolve().parent.parent
    child = subprocess.Popen([sys.executable, "-c", CHILD, address], stdout=subprocess.PIPE, text=True, cwd=root)
    with child, ThreadPoolExecutor(1) as pool:
        contact = child.stdout.readline().strip()
        with ControlClient(contact) as client:
            answer = pool.submit(client.open, OPEN, WAIT_S)
            assert child.stdout.readline() == "called\n"
            child.send_signal(signal.SIGKILL)
            with pytest.raises(PeerError) as caught:
                answer.result(WAIT_S)
            assert caught.value.reason in {"PEER_UNREACHABLE", "PEER_STOPPED"}
            child.wait()
            # The dead one's socket file is no obstacle, and the old client finds the new server.
            with ControlServer(Handler(), [contact]):
                assert once_there(lambda: client.complete(COMPLETE, WAIT_S)) == ANSWERS["Complete"]


def test_a_server_stopped_during_a_call(address: str) -> None:
    with serving(address) as (handler, server, client), ThreadPoolExecutor(2) as pool:
        handler.gate.clear()
        answer = pool.submit(client.open, OPEN)
        handler.seen.get(timeout=WAIT_S)
        stopped = pool.submit(server.stop, 0)
        with pytest.raises(PeerError):
            answer.result(WAIT_S)
        handler.gate.set()
        stopped.result(WAIT_S)


def test_a_running_call_may_finish_in_the_grace_of_stop(address: str) -> None:
    with serving(address) as (handler, server, client), ThreadPoolExecutor(2) as pool:
        handler.gate.clear()
        answer = pool.submit(client.open, OPEN)
        handler.seen.get(timeout=WAIT_S)
        stopped = pool.submit(server.stop, WAIT_S)
        handler.gate.set()
        assert answer.result(WAIT_S) == ANSWERS["Open"]
        stopped.result(WAIT_S)


def test_a_stuck_handler_is_reported_and_does_not_hold_stop(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with serving(address) as (handler, server, client), ThreadPoolExecutor(1) as pool:
        handler.gate.clear()
        answer = pool.submit(client.open, OPEN)
        handler.seen.get(timeout=WAIT_S)
        server.stop(0)
        assert "still run" in caplog.text
        with pytest.raises(PeerError):
            answer.result(WAIT_S)


def test_closing_a_client_ends_its_calls(address: str) -> None:
    with serving(address) as (handler, _, client), ThreadPoolExecutor(1) as pool:
        handler.gate.clear()
        answer = pool.submit(client.open, OPEN)
        handler.seen.get(timeout=WAIT_S)
        client.close()
        client.close()
        with pytest.raises(AbortedError) as caught:
            answer.result(WAIT_S)
        assert caught.value.reason == "CLIENT_CLOSED"
        with pytest.raises(MisuseError):
            client.complete(COMPLETE)


# Addresses and sockets.


@pytest.mark.parametrize(
    "text",
    ["", "localhost:80", "http://a:1", "unix://relative", "unix:///dir/", "unix:///a\0b", "tcp://", "tcp://host", "tcp://:5",
     "tcp://host:x", "tcp://host:70000", "tcp://user@host:5", "tcp://host:5/path", "tcp://[::1:5"],
)  # fmt: skip
def test_malformed_addresses_are_misuse(text: str) -> None:
    for make in (ControlClient, lambda address: ControlServer(Handler(), [address])):
        with pytest.raises(MisuseError):
            make(text)


@given(st.sampled_from(["127.0.0.1", "host.example", "::1"]), st.integers(0, 65535))
def test_tcp_addresses_parse_and_print(host: str, port: int) -> None:
    endpoint = Endpoint(host=host, port=port)
    assert Endpoint.parse(str(endpoint)) == endpoint


def test_socket_paths_too_long_are_refused_clearly(socket_dir: str) -> None:
    room = 107 - len(socket_dir) - 1
    with serving(f"unix://{socket_dir}/{'s' * room}") as (_, _, client):
        assert client.complete(COMPLETE) == ANSWERS["Complete"]
    with pytest.raises(MisuseError, match="107"):
        ControlServer(Handler(), [f"unix://{socket_dir}/{'s' * (room + 1)}"])


def test_socket_paths_with_odd_characters(socket_dir: str) -> None:
    address = f"unix://{socket_dir}/a %41?#ü.sock"
    with ControlServer(Handler(), [address]) as server, ControlClient(address) as client:
        assert server.contact_addresses == (address,)
        assert client.complete(COMPLETE, WAIT_S) == ANSWERS["Complete"]
        assert os.listdir(socket_dir) == ["a %41?#ü.sock"]


def test_the_socket_is_private_and_gone_after_stop(socket_dir: str) -> None:
    path = Path(socket_dir) / "made" / "control.sock"
    server = ControlServer(Handler(), [f"unix://{path}"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    server.start()
    server.stop()
    server.stop()
    assert list(path.parent.iterdir()) == []
    with pytest.raises(MisuseError):
        server.start()


def test_directories_open_to_others_are_refused(socket_dir: str) -> None:
    for mode in (0o770, 0o755, 0o777):
        os.chmod(socket_dir, mode)
        with pytest.raises(MisuseError, match="mode"):
            ControlServer(Handler(), [f"unix://{socket_dir}/control.sock"])
    os.chmod(socket_dir, 0o750)
    ControlServer(Handler(), [f"unix://{socket_dir}/control.sock"]).stop()


def test_what_lies_at_the_socket_path_is_respected(socket_dir: str) -> None:
    path = Path(socket_dir) / "control.sock"
    path.write_text("precious")
    with pytest.raises(MisuseError, match="not a socket"):
        ControlServer(Handler(), [f"unix://{path}"])
    assert path.read_text() == "precious"
    path.unlink()
    with ControlServer(Handler(), [f"unix://{path}"]), ControlClient(f"unix://{path}") as client:
        with pytest.raises(MisuseError, match="another server"):
            ControlServer(Handler(), [f"unix://{path}"])
        assert client.complete(COMPLETE, WAIT_S) == ANSWERS["Complete"]


def test_a_taken_port_is_refused() -> None:
    with serving("tcp://127.0.0.1:0") as (_, _, client), pytest.raises(MisuseError, match="can't listen"):
        ControlServer(Handler(), [client.address])


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "[2001:db8::1]"])
def test_addresses_other_machines_can_reach_are_refused(host: str) -> None:
    with pytest.raises(MisuseError):
        ControlServer(Handler(), [f"tcp://{host}:0"])


def test_wildcards_are_refused_even_when_remote_is_allowed() -> None:
    with pytest.raises(MisuseError, match="every interface"):
        ControlServer(Handler(), ["tcp://0.0.0.0:0"], insecure=True)
    with pytest.raises(MisuseError, match="can't listen"):
        ControlServer(Handler(), ["tcp://192.0.2.1:0"], insecure=True)


def test_two_servers_at_once_and_one_at_two_addresses(socket_dir: str) -> None:
    first, second = Handler({"Complete": Completed(state="first")}), Handler({"Complete": Completed(state="second")})
    with (
        ControlServer(first, [f"unix://{socket_dir}/1.sock", "tcp://localhost:0"]) as one,
        ControlServer(second, ["tcp://127.0.0.1:0", f"unix://{socket_dir}/2.sock"]) as two,
    ):
        for server, state in ((one, "first"), (two, "second")):
            for contact in server.contact_addresses:
                with ControlClient(contact) as client:
                    assert client.complete(COMPLETE, WAIT_S).state == state


def test_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with serving("tcp://127.0.0.1:0") as (_, _, client):
        assert client.complete(COMPLETE) == ANSWERS["Complete"]


# Health, reflection, traces left.


def test_health(address: str) -> None:
    with serving(address) as (_, server, client):
        assert client.health() == client.health(SERVICE) == "SERVING"
        assert client.health("transport.tcp") == "SERVICE_UNKNOWN"
        server.set_serving(True, "transport.tcp")
        server.set_serving(False)
        assert client.health() == client.health(SERVICE) == "NOT_SERVING"
        assert client.health("transport.tcp") == "SERVING"
        assert client.complete(COMPLETE) == ANSWERS["Complete"]


def test_reflection_can_be_had_or_not(address: str) -> None:
    ask = [reflection_pb2.ServerReflectionRequest(list_services="")]
    with ControlServer(Handler(), [address]) as server, raw_channel(server) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter(ask), timeout=WAIT_S)
        listed = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name} <= listed
    with ControlServer(Handler(), [address], reflection=False) as server, raw_channel(server) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.ServerReflectionInfo(iter(ask), timeout=WAIT_S))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_nothing_is_left_open(socket_dir: str) -> None:
    def cycle(*, start: bool) -> None:
        server = ControlServer(Handler(), [f"unix://{socket_dir}/control.sock", "tcp://127.0.0.1:0"])
        if start:
            server.start()
            for contact in server.contact_addresses:
                with ControlClient(contact) as client:
                    client.complete(COMPLETE, WAIT_S)
                    client.health("", WAIT_S)
        server.stop()

    cycle(start=True)  # What gRPC opens once per process is not ours to close.
    fds, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    for start in (True, True, False, False):
        cycle(start=start)
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= fds)
    assert eventually(lambda: set(threading.enumerate()) <= threads)


def test_importing_the_package_does_not_load_grpc() -> None:
    code = "import sys, pdxfer.control; assert not {'grpc', 'google.protobuf'} & set(sys.modules), 'loaded'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parent.parent)


def test_both_ends_agree_on_keepalive() -> None:
    options = dict(SHARED_OPTIONS)
    # A server that sees pings more often than it permits closes the connection.
    assert options["grpc.keepalive_time_ms"] > options["grpc.http2.min_ping_interval_without_data_ms"]
    assert LIMITS["layout_bytes"] + 16 * LIMITS["name_chars"] * 4 < MAX_MESSAGE_BYTES
