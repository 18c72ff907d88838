"""CURVE: encrypted ZMQ connections between agents that know each other's keys from the control plane.

In come sockets and the public keys of peers that introduced themselves; out come sockets that let in nobody else.
A listener's public key is part of its contact address, which travels in the (mutual TLS) answer to Describe; the
connecting side's key travels in Describe itself. Keys are made anew by every agent and never written anywhere.

ZMQ asks (ZAP, RFC 27) on an inproc socket whether a key is let in; the transport's I/O thread answers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import zmq
from zmq.utils import z85

from pdxfer.errors import MisuseError
from pdxfer.transport.tcp_io import IoThread

__all__ = ["KEY_BYTES", "Curve", "new_keys"]

KEY_BYTES = 32
_PEERS_MAX = 4096
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"pdxfer"


def new_keys() -> tuple[bytes, bytes] | None:
    """Return a (public, secret) pair for all ZMQ transports of an agent, or None where libzmq has no CURVE."""
    return zmq.curve_keypair() if zmq.has("curve") else None


class Curve:
    """A key pair (a new one unless given) and the keys one transport lets in. Thread-safe."""

    def __init__(self, io: IoThread, keys: tuple[bytes, bytes] | None = None) -> None:
        if not zmq.has("curve"):
            raise MisuseError("this libzmq has no CURVE", hint="install pyzmq from its own wheels")
        public, self._secret = keys or zmq.curve_keypair()
        self._public = public
        self.public_key: bytes = z85.decode(public)
        self._io = io
        self._peers: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._asked: zmq.Socket[bytes] | None = None
        self.refused = 0

    def admit(self, peer: str, key: bytes) -> None:
        """Let this key in; an earlier key of the same peer is not let in any more."""
        if len(key) != KEY_BYTES:
            raise MisuseError(f"a CURVE key has {KEY_BYTES} bytes, not {len(key)}")
        with self._lock:
            self._peers[peer] = key
            self._peers.move_to_end(peer)
            while len(self._peers) > _PEERS_MAX:
                self._peers.popitem(last=False)

    def secure_listener(self, sock: zmq.Socket[bytes]) -> None:
        """Make a socket let in known keys only; before bind, on the I/O thread."""
        if self._asked is None:
            self._asked = self._io.context.socket(zmq.REP)
            self._asked.linger = 0
            self._asked.bind(_ZAP)
            self._io.watch(self._asked, self._answer)
        sock.curve_server = True
        sock.curve_publickey, sock.curve_secretkey = self._public, self._secret
        sock.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)

    def secure_connection(self, sock: zmq.Socket[bytes], server_key: bytes) -> None:
        """Make a socket talk to the holder of ``server_key`` only; before connect."""
        sock.curve_publickey, sock.curve_secretkey = self._public, self._secret
        sock.curve_serverkey = z85.encode(server_key)

    def _answer(self) -> None:
        """On the I/O thread: one question of ZMQ's. Whatever is not a known key in our domain is refused."""
        asked = self._asked
        assert asked is not None
        version, request, domain, _, _, mechanism, *credentials = asked.recv_multipart(zmq.NOBLOCK)
        with self._lock:
            known = credentials[0] in self._peers.values() if len(credentials) == 1 else False
        let_in = (version, domain, mechanism) == (b"1.0", _DOMAIN, b"CURVE") and known
        self.refused += not let_in
        code, text = (b"200", b"") if let_in else (b"400", b"")
        asked.send_multipart([b"1.0", request, code, text, b"", b""], zmq.NOBLOCK)
