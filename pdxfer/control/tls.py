"""Mutual TLS for control addresses that other hosts can reach: whom we believe, and how certificates are renewed.

In come paths of PEM files and an allow-list; out come gRPC credentials, and who is at the other end (``Caller``).
Files are looked at again for every new connection, on both ends: renewed certificates need no restart, and what was
connected stays connected. A renewal that can't be read changes nothing and is reported in the log.

A client can't ask gRPC who answered. So before the first call it makes a TLS handshake of its own, checks the chain
and the allow-list, and then has gRPC accept that very certificate and no other. When the server renews it, the next
connection begins with such a look again.

==============================  ===========================================================
entry of ``peers``              whom it lets in, as the certificate's URI or DNS name says
==============================  ===========================================================
``spiffe://prod/decode/0``      exactly this one
``spiffe://prod/decode/*``      all below
``*.decode.example``            all with one more label
``spiffe://prod/decode/0=d0``   this one, which may speak for worker ``d0`` only
==============================  ===========================================================
"""

from __future__ import annotations

import calendar
import logging
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from pdxfer.errors import DeadlineError, MisuseError, PeerError
from pdxfer.keys import read_secret

__all__ = ["LOCAL", "Caller", "Credentials", "Pem", "Tls"]

_log = logging.getLogger(__name__)
_FILE_BYTES_MAX = 1 << 20
_LEAF = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
#: Two times in a row (UTCTime or GeneralizedTime, RFC 5280): from when, until when.
_VALIDITY = re.compile(rb"(?:\x17\x0d\d{12}Z|\x18\x0f\d{14}Z)(?:\x17\x0d(\d{12})Z|\x18\x0f(\d{14})Z)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who is at the other end: an identity, and the workers it may speak for (None: any)."""

    identity: str
    workers: frozenset[str] | None = None

    def speaks_for(self, worker: str) -> bool:
        """Whether it may say that it is this worker."""
        return self.workers is None or worker in self.workers


#: Whoever reached a private Unix socket or loopback, or a port that was opened with ``insecure``.
LOCAL = Caller(identity="local")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Paths of PEM files, and the peers that are let in.

    Attributes:
        ca: who signs peers. cert: our chain, leaf first; key: its private key, which nobody else may read.
            A server's leaf needs a DNS name or a common name beside a URI, for gRPC looks for one.
        peers: the allow-list, see the module.
    """

    ca: str
    cert: str
    key: str
    peers: tuple[str, ...]

    def __post_init__(self) -> None:
        if isinstance(self.peers, str) or not all(isinstance(entry, str) for entry in self.peers):
            raise MisuseError(f"tls.peers is a list of texts, not {self.peers!r}")
        object.__setattr__(self, "peers", tuple(self.peers))
        if not all(isinstance(p, str) and p for p in (self.ca, self.cert, self.key)) or not self.peers:
            raise MisuseError("tls needs ca, cert and key, and at least one entry in peers")
        for entry in self.peers:
            identity = entry.rpartition("=")[0] if "=" in entry else entry
            _, is_uri, rest = identity.rpartition("://")
            plain = rest.removesuffix("/*") if is_uri else rest.removeprefix("*.")
            if not plain.strip("/.") or "*" in plain or entry.endswith("="):
                hint = "write spiffe://prod/decode/0, spiffe://prod/decode/*, *.decode.example, or one with =worker"
                raise MisuseError(f"tls.peers has {entry!r}, which names nobody or everybody", hint=hint)

    def caller(self, identities: Iterable[str]) -> Caller | None:
        """Who these URIs and DNS names of a certificate are; None when the allow-list has none of them."""
        for identity in identities:
            found = [entry.rpartition("=") if "=" in entry else (entry, "", "") for entry in self.peers]
            workers = [worker for pattern, _, worker in found if _matches(pattern, identity)]
            if workers:
                return Caller(identity=identity, workers=None if "" in workers else frozenset(workers))
        return None


def _matches(pattern: str, identity: str) -> bool:
    if pattern.endswith("/*"):
        return "://" in identity and identity.startswith(pattern[:-1]) and len(identity) >= len(pattern)
    if pattern.startswith("*."):
        return "://" not in identity and identity.partition(".")[2].lower() == pattern[2:].lower()
    return identity == pattern if "://" in pattern else identity.lower() == pattern.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pem:
    """What the three files hold."""

    ca: bytes
    cert: bytes
    key: bytes

    @classmethod
    def read(cls, tls: Tls) -> Pem:
        """Read and check that certificate and key belong together; raises MisuseError."""
        try:
            key = read_secret(tls.key, nbytes_max=_FILE_BYTES_MAX)
            pem = cls(ca=_read(tls.ca), cert=_read(tls.cert), key=key)
            pem.client_context()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise MisuseError(f"the certificates of tls can't be used: {error}") from error
        return pem

    def client_context(self) -> ssl.SSLContext:
        """Python's own side of a handshake; raises OSError or ValueError when the three don't fit together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # names are compared with the allow-list
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        context.load_verify_locations(cadata=self.ca.decode("ascii"))
        fd = os.memfd_create("pdxfer-tls")  # OpenSSL takes only files, and ours may change under it
        try:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(self.cert + b"\n" + self.key)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context

    def not_after(self) -> float:
        """When our own certificate ends, in Unix seconds; raises MisuseError when that can't be read."""
        leaf = _LEAF.search(self.cert)
        found = _VALIDITY.search(ssl.PEM_cert_to_DER_cert(leaf[0].decode("ascii"))) if leaf else None
        if found is None:
            raise MisuseError("the certificate does not say how long it is valid")
        return float(calendar.timegm(time.strptime((found[1] or found[2][2:]).decode(), "%y%m%d%H%M%S")))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_FILE_BYTES_MAX)


class Credentials:
    """The files behind a ``Tls``, read again when they change. Thread-safe."""

    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        self._lock = threading.Lock()
        self._seen = self._look()
        self._pem = Pem.read(tls)

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for path in (self.tls.ca, self.tls.cert, self.tls.key):
            try:
                info = os.stat(path)
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((info.st_mtime_ns, info.st_size, info.st_ino))
        return tuple(found)

    def pem(self) -> Pem:
        """What is in force now."""
        with self._lock:
            seen = self._look()
            if seen != self._seen:
                try:
                    self._pem, self._seen = Pem.read(self.tls), seen
                except MisuseError as error:  # half of a renewal, mostly; the next connection looks again
                    _log.error("the old certificates stay: %s", error.message)
            return self._pem

    def server(self) -> Any:
        """gRPC's credentials for a port: a client needs a certificate of our CA."""
        given = [self.pem()]

        def renewed() -> Any:
            pem = self.pem()
            if pem is given[0]:
                return None
            given[0] = pem
            return _server_config(pem)

        return grpc.dynamic_ssl_server_credentials(
            _server_config(given[0]), renewed, require_client_authentication=True
        )

    def meet(self, host: str, port: int, *, timeout_s: float) -> tuple[Caller, bytes, Any, str]:
        """Look who answers at ``host``; returns the caller, its leaf, and gRPC's credentials and name for it alone.

        Raises:
            PeerError: nobody, or nobody that we know. DeadlineError: no handshake in time.
        """
        pem, where = self.pem(), f"{host} port {port}"
        try:
            leaf, found = _handshake(pem.client_context(), host, port, timeout_s)
        except TimeoutError as error:
            raise DeadlineError(f"{where} did not answer a TLS handshake in time") from error
        except ssl.SSLError as error:
            hint = "do both ends trust one CA, and is the certificate still good?"
            raise PeerError(
                f"{where} is not to be trusted: {error.reason or error}", hint=hint, reason="IDENTITY_REJECTED"
            ) from error
        except OSError as error:
            raise PeerError(f"{where} can't be reached: {error}", reason="PEER_UNREACHABLE") from error
        sans = [(kind, value) for kind, value in found.get("subjectAltName", ()) if kind in ("URI", "DNS")]
        caller = self.tls.caller(value for _, value in sans)
        if caller is None:
            raise PeerError(f"{where} is not one of tls.peers", reason="IDENTITY_REJECTED")
        names = [value for kind, value in sans if kind == "DNS"]
        names += [v for part in found.get("subject", ()) for k, v in part if k == "commonName"]
        chosen = names[0].replace("*", "any") if names else host
        pinned = ssl.DER_cert_to_PEM_cert(leaf).encode()
        return caller, leaf, grpc.ssl_channel_credentials(pinned, pem.key, pem.cert), chosen


def _handshake(context: ssl.SSLContext, host: str, port: int, timeout_s: float) -> tuple[bytes, Any]:
    with (
        socket.create_connection((host, port), timeout=timeout_s) as plain,
        context.wrap_socket(plain) as secure,
    ):
        leaf = secure.getpeercert(binary_form=True)
        assert leaf is not None, "verified above"
        return leaf, secure.getpeercert()


def _server_config(pem: Pem) -> Any:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.ca)
