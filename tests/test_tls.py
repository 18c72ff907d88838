"""Mutual TLS on the control plane: who gets in at either end, who speaks for whom, certificates renewed in place."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from pdxfer.control import ControlClient, ControlServer, Credentials, Tls
from pdxfer.control.convert import METHODS
from pdxfer.errors import DeadlineError, MisuseError, PdxferError, PeerError, TicketError
from pdxfer.messages import Complete, Describe
from tests.certificates import Authority
from tests.controlled import EPOCH, SESSION, WAIT_S, Handler, once_there

PREFILL, DECODE = "spiffe://prod/prefill/0", "spiffe://prod/decode/0"


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@contextmanager
def serving(tls: Tls, **options):
    with ControlServer(Handler(), ["tcp://127.0.0.1:0"], credentials=Credentials(tls), **options) as server:
        yield server.contact_addresses[0]


def call(address: str, tls: Tls, worker: str = "w") -> str:
    with ControlClient(address, credentials=Credentials(tls)) as client:
        return client.complete(complete(worker), WAIT_S).state


def complete(worker: str) -> Complete:
    return Complete(
        transfer="t", epoch=EPOCH, source_epoch=EPOCH, session=SESSION, target_worker=worker, target_rank=0,
        generation=0, payload_bytes=0,
    )  # fmt: skip


@pytest.mark.parametrize("names", [(PREFILL,), ("prefill.example",), (PREFILL, "prefill.example"), ("*.pool.example",)])
def test_both_ends_know_each_other(authority, names):
    server = authority.tls(*names, common_name="prefill", peers=("spiffe://prod/decode/*",))
    client = authority.tls(DECODE, peers=(names[0],))
    with serving(server) as address:
        assert call(address, client) == "done"


@pytest.mark.parametrize(
    ("server_peers", "client_peers", "error"),
    [
        ((PREFILL,), (PREFILL,), TicketError),
        (("spiffe://prod/decode/",), (PREFILL,), TicketError),
        (("spiffe://prod/decode/0/*",), (PREFILL,), TicketError),
        (("decode",), (PREFILL,), TicketError),
        ((DECODE,), (DECODE,), PeerError),
        ((DECODE,), ("spiffe://prod/prefill/1",), PeerError),
        ((DECODE,), ("prefill",), PeerError),  # the common name is nobody's name
    ],
)
def test_who_is_not_on_the_list_is_refused_at_either_end(authority, server_peers, client_peers, error):
    server = authority.tls(PREFILL, common_name="prefill", peers=server_peers)
    client = authority.tls(DECODE, common_name="decode", peers=client_peers)
    with serving(server) as address, pytest.raises(error) as caught:
        call(address, client)
    assert caught.value.reason == "IDENTITY_REJECTED"
    for secret in (DECODE, str(authority.directory)):  # to a stranger: no names, no paths
        assert error is PeerError or secret not in str(caught.value)


def test_another_authority_and_an_expired_certificate_are_refused_at_either_end(authority, tmp_path):
    other = Authority(tmp_path / "other", "other")
    good = authority.tls(PREFILL, common_name="p", peers=("spiffe://prod/*",))
    strangers = [
        replace(other.tls(DECODE, common_name="d", peers=good.peers), ca=good.ca),
        authority.tls(DECODE, common_name="d", peers=good.peers, days=-1),
    ]
    for stranger in strangers:
        for server, client in ((good, stranger), (stranger, good)):
            with serving(server) as address, pytest.raises(PeerError):
                call(address, client)


def test_nobody_speaks_plainly_to_a_tls_port_nor_without_a_certificate(authority):
    tls = authority.tls(PREFILL, common_name="p", peers=(DECODE,))
    with serving(tls) as address:
        with ControlClient(address) as plain, pytest.raises(PeerError):
            plain.complete(complete("w"), WAIT_S)
        root = grpc.ssl_channel_credentials(Path(tls.ca).read_bytes())
        options = [("grpc.ssl_target_name_override", "p")]
        with grpc.secure_channel(address.removeprefix("tcp://"), root, options=options) as channel:
            ask = channel.unary_unary(METHODS["Complete"].path)
            with pytest.raises(grpc.RpcError):
                ask(METHODS["Complete"].request.encode(complete("w")), timeout=WAIT_S)


def test_a_caller_speaks_for_its_own_worker_only(authority):
    server = authority.tls("p.example", peers=(f"{DECODE}=d0", f"{DECODE}=d1", "spiffe://prod/any"))
    named = authority.tls(DECODE, peers=("p.example=w",))
    with serving(server) as address:
        assert {call(address, named, worker) for worker in ("d0", "d1")} == {"done"}
        assert call(address, authority.tls("spiffe://prod/any", peers=("p.example",)), "anyone") == "done"
        with pytest.raises(TicketError, match="may not speak for that worker"):
            call(address, named, "d2")
        describe = Describe(protocol_version=1, epoch=EPOCH, worker="d0", rank=0, layout=b"{}")
        with ControlClient(address, credentials=Credentials(named)) as client:
            assert client.describe(describe, WAIT_S).worker == "w"
            with pytest.raises(TicketError):
                client.describe(replace(describe, worker="d2"), WAIT_S)
        wrong = replace(named, peers=("p.example=another",))
        with ControlClient(address, credentials=Credentials(wrong)) as client, pytest.raises(PeerError, match="'w'"):
            client.describe(describe, WAIT_S)


def test_certificates_are_renewed_under_load_without_a_failed_call(authority):
    server = authority.tls(PREFILL, common_name="p", peers=(DECODE,))
    client = authority.tls(DECODE, common_name="d", peers=(PREFILL,))
    errors: list[PdxferError] = []
    done, calls = threading.Event(), [0]

    credentials = Credentials(client)  # an agent has one, for all its clients; half a renewal changes nothing in it

    def load(address: str) -> None:
        steady = ControlClient(address, credentials=credentials)
        with steady:
            while not done.is_set():
                try:
                    steady.complete(complete("w"), WAIT_S)
                    with ControlClient(address, credentials=credentials) as fresh:
                        fresh.complete(complete("w"), WAIT_S)
                    calls[0] += 2
                except PdxferError as error:
                    errors.append(error)

    with serving(server) as address:
        threads = [threading.Thread(target=load, args=(address,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        serials = set()
        for _ in range(6):
            authority.renew(server, PREFILL, common_name="p")
            authority.renew(client, DECODE, common_name="d")
            serials.add(leaf_of(address, client))
        done.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert calls[0] > 0
    assert len(serials) == 6  # every new connection saw the newest one


def leaf_of(address: str, tls: Tls) -> bytes:
    host, _, port = address.removeprefix("tcp://").partition(":")
    return Credentials(tls).meet(host, int(port), timeout_s=WAIT_S)[1]


def test_a_client_follows_a_server_that_came_back_with_another_certificate(authority):
    tls = authority.tls(PREFILL, common_name="p", peers=(DECODE,))
    client_tls = authority.tls(DECODE, peers=(PREFILL,))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ControlClient(f"tcp://127.0.0.1:{port}", credentials=Credentials(client_tls)) as client:
        for _ in range(2):
            with ControlServer(Handler(), [f"tcp://127.0.0.1:{port}"], credentials=Credentials(tls)):
                assert once_there(lambda: client.complete(complete("w"), WAIT_S)).state == "done"
            authority.renew(tls, PREFILL, common_name="p")
        authority.renew(tls, "spiffe://prod/prefill/9", common_name="p")  # somebody else took the port
        with (
            ControlServer(Handler(), [f"tcp://127.0.0.1:{port}"], credentials=Credentials(tls)),
            pytest.raises(PeerError),
        ):
            client.complete(complete("w"), WAIT_S)


def test_a_client_whose_own_certificate_ran_out_goes_on_with_the_renewed_one(authority):
    client_tls = authority.tls(DECODE, peers=(PREFILL,), days=-1)
    with (
        serving(authority.tls(PREFILL, common_name="p", peers=(DECODE,))) as address,
        ControlClient(address, credentials=Credentials(client_tls)) as client,
    ):
        with pytest.raises(PeerError):
            client.complete(complete("w"), WAIT_S)
        authority.renew(client_tls, DECODE)
        assert client.complete(complete("w"), WAIT_S).state == "done"


def test_who_waits_for_a_look_waits_no_longer_than_its_own_deadline(authority):
    silent = socket.create_server(("127.0.0.1", 0))  # accepts, and never says a word
    address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
    errors: list[PdxferError] = []

    def ask(timeout_s: float) -> None:
        try:
            client.complete(complete("w"), timeout_s)
        except PdxferError as error:
            errors.append(error)

    client = ControlClient(address, credentials=Credentials(authority.tls(DECODE, peers=(PREFILL,))))
    with silent, client:
        patient = threading.Thread(target=ask, args=(1.5,))
        patient.start()
        ask(0.1)
        assert [type(error) for error in errors] == [DeadlineError]
        patient.join()
    assert [type(error) for error in errors] == [DeadlineError] * 2


def test_a_renewal_that_can_t_be_read_changes_nothing(authority, caplog):
    tls = authority.tls(PREFILL, peers=(DECODE,))
    credentials = Credentials(tls)
    before = credentials.pem()
    with open(tls.cert, "w") as file:
        file.write("half of it")
    assert credentials.pem() is before
    assert "the old certificates stay" in caplog.text
    authority.renew(tls, PREFILL)
    assert credentials.pem().cert != before.cert


def test_bad_files_and_lists_are_refused_by_name(authority):
    tls = authority.tls(PREFILL, peers=(DECODE,))
    other = authority.tls(DECODE, peers=(PREFILL,))
    for wrong in ({"key": other.key}, {"cert": tls.ca}, {"ca": tls.key}, {"cert": "/nowhere"}, {"key": os.devnull}):
        with pytest.raises(MisuseError, match=r"certificates|secret"):
            Credentials(replace(tls, **wrong))
    os.chmod(other.key, 0o644)
    with pytest.raises(MisuseError, match="others can read"):
        Credentials(other)
    for peers in (
        (),
        ("",),
        ("*",),
        ("*.",),
        ("/*",),
        ("spiffe://",),
        ("spiffe://*",),
        ("a*b",),
        ("*.*.example",),
        ("x=",),
        "spiffe://prod/decode/0",
        (7,),
    ):
        with pytest.raises(MisuseError, match="peers"):
            replace(tls, peers=peers)


@pytest.mark.parametrize("address", ["tcp://192.0.2.1:7000", "tcp://[2001:db8::1]:7000", "tcp://prefill.example:7000"])
def test_an_address_of_another_host_is_called_over_tls_or_not_at_all(authority, address):
    with pytest.raises(MisuseError, match="another host"):
        ControlClient(address)
    ControlClient(address, insecure=True).close()
    ControlClient(address, credentials=Credentials(authority.tls(DECODE, peers=(PREFILL,)))).close()


def test_a_non_loopback_address_is_bound_with_tls_or_insecure_in_so_many_words(authority, caplog):
    address = "tcp://192.0.2.1:0"  # nobody's: past the policy, binding fails
    with pytest.raises(MisuseError, match="other machines"):
        ControlServer(Handler(), [address])
    for options in ({"insecure": True}, {"credentials": Credentials(authority.tls(PREFILL, peers=(DECODE,)))}):
        caplog.clear()
        with pytest.raises(MisuseError, match="can't listen"):
            ControlServer(Handler(), [address], **options)
        assert ("INSECURE" in caplog.text) == ("insecure" in options)


def test_another_user_s_socket_is_not_called(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        os.chown(path, 12345, 12345)
        with pytest.raises(MisuseError, match="belongs to user 12345"):
            ControlClient(f"unix://{path}")
