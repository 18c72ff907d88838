"""What both ends of the control plane must agree on: addresses, the message bound, keepalive.

In comes an address as people write it, out goes a checked ``Endpoint`` and the gRPC options that server and
client have in common. No gRPC is imported here, and no socket is opened.

=====================  ====================================================================
``unix:///run/a.sock``  a Unix socket; absolute path, at most 107 bytes
``tcp://host:port``     TCP; port 0 means a free port, for servers only; IPv6 in brackets
=====================  ====================================================================
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from pdxfer.errors import MisuseError

__all__ = ["MAX_MESSAGE_BYTES", "SHARED_OPTIONS", "Endpoint"]

#: Bound of one message in either direction; a layout of ``LIMITS["layout_bytes"]`` fits.
MAX_MESSAGE_BYTES = 4 << 20

#: Pings are sent every 3 s: a path that went dead without a word (half-open) must not take calls for half a minute. A
#: server takes offence at more than one a second, so that two ends of equal version never close each other's connection
#: with ENHANCE_YOUR_CALM. gRPC's own threads answer, so a process that is merely busy is not taken for dead.
SHARED_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 3_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)

#: ``sun_path`` holds 108 bytes on Linux, one of them the terminator.
_UNIX_PATH_BYTES = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One parsed address: either ``path`` is set (Unix) or ``host`` and ``port`` are (TCP)."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, address: str) -> Endpoint:
        """Read an address; ``str()`` of the result is its inverse.

        Raises:
            MisuseError: unknown scheme, relative or overlong path, missing host or port.
        """
        scheme, separator, rest = address.partition("://")
        if separator and scheme == "unix":
            return cls._parse_unix(address, rest)
        if separator and scheme == "tcp":
            return cls._parse_tcp(address)
        raise MisuseError(
            f"control address {address!r} has no known scheme", hint="use unix:///path or tcp://host:port"
        )

    @classmethod
    def _parse_unix(cls, address: str, path: str) -> Endpoint:
        if not path.startswith("/") or path.endswith("/") or "\0" in path:
            raise MisuseError(f"control address {address!r} needs an absolute path of a file", hint="use unix:///path")
        size = len(os.fsencode(path))
        if size > _UNIX_PATH_BYTES:
            raise MisuseError(
                f"socket path {path!r} has {size} bytes; the system allows {_UNIX_PATH_BYTES}",
                hint="put the socket into a directory with a shorter name",
            )
        return cls(path=path)

    @classmethod
    def _parse_tcp(cls, address: str) -> Endpoint:
        try:
            parts = urlsplit(address)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise MisuseError(
                f"control address {address!r} can't be read: {error}", hint="use tcp://host:port"
            ) from error
        if not host or port is None or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
            raise MisuseError(
                f"control address {address!r} needs a host and a port, nothing else", hint="use tcp://host:port"
            )
        return cls(host=host, port=port)

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.path else f"tcp://{self._authority}"

    @property
    def grpc_target(self) -> str:
        """The same in gRPC's own syntax, in which a Unix path is percent-encoded."""
        return f"unix:{quote(os.fsencode(self.path))}" if self.path else self._authority

    @property
    def _authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The host as an IP address; None when it is a name or a Unix path."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    def check_open(self, ip: ipaddress.IPv4Address | ipaddress.IPv6Address, *, allowed: bool) -> bool:
        """Whether other machines can reach ``ip``, this endpoint's; raises MisuseError unless that is ``allowed``."""
        if ip.is_unspecified:
            raise MisuseError(f"{self} would listen on every interface", hint="give the address of one interface")
        if not ip.is_loopback and not allowed:
            raise MisuseError(
                f"{self} can be reached from other machines, and nothing would say who calls",
                hint="set tls, or listen on 127.0.0.1 or a unix:// path; insecure=true opens it to everybody",
            )
        return not ip.is_loopback
