"""Config of one rank's agent: frozen, checked on construction; and what of it may change while the agent runs.

Where the values come from (flags, environment, files) is the affair of ``pdxfer.config``; it reads the fields here.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from pdxfer.agent.quotas import Quotas
from pdxfer.control import Tls
from pdxfer.control.endpoint import Endpoint
from pdxfer.errors import MisuseError
from pdxfer.messages import LIMITS
from pdxfer.packing import KERNELS, native_available
from pdxfer.transport import WINDOW_MESSAGES, known_schemes

__all__ = ["RELOADABLE", "AgentConfig", "DaemonConfig", "Incarnation", "shifted"]

_Kind = TypeVar("_Kind")
_ARENA_BYTES_MAX = 1 << 48  # far beyond any memory
_SECONDS_MAX = 1_000_000  # what polls and locks can wait

#: Fields that ``Agent.reconfigure`` takes over while the agent runs.
RELOADABLE = ("call_s", "hold_max_s", "lease_s", "quotas", "stall_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How one rank's agent works.

    Attributes:
        worker: name of the worker, unique among peers; rank: this rank's number.
        control: control addresses to bind (``unix:///path``, ``tcp://host:port``); () is a private Unix socket.
        transports: data transports to offer and use, best first, or ``("auto",)``: all that are installed (gloo and
            nccl only with an entry in transport_options, be it empty: they load torch), and for each
            peer the quickest by estimate (``choice.py``). transport_options: by scheme.
        listen: data addresses to bind, by scheme (``tcp://host:port``); others bind a private one of this host.
        mode: ``auto``, ``packed`` or ``direct``. kernel: ``auto``, ``native``, ``numpy`` or ``torch``.
        copy_threads: chunks that this process copies or digests at a time, all its agents together; 0 is half the
            cores with digests, for the source's take the others, and no bound without.
        arena_bytes: bound of the staging memory of one transport; chunk_bytes: bound of a message.
        window: chunks underway per edge (``window_of``); lease_s: how long an offer waits for its next sign of life.
        hold_max_s: how long an offer may be held, by renewals, before anybody opens it.
        ticket_keys: file (or ``fd:N``) of the keys that seal tickets, see ``keys.py``; "" is a random one.
        call_s: bound of one control call; a machine whose cores are all busy needs more.
        stall_s: how long a chunk waits for staging or for room on a channel.
        tls: who we are to other hosts, and whom we believe: ``Tls``, or a mapping of its fields. Needed for any address
            that is not this host's own, to bind and to call.
        quotas: what one peer or tenant may take of us at a time: ``Quotas``, or a mapping of its fields.
        insecure: bind and call such addresses without it: whoever reaches them can pose as any peer.
    """

    worker: str
    rank: int = 0
    control: tuple[str, ...] = ()
    transports: tuple[str, ...] = ("shm", "tcp")
    transport_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    listen: Mapping[str, str] = field(default_factory=dict)
    mode: str = "auto"
    kernel: str = "auto"
    copy_threads: int = 0
    digests: bool = True
    arena_bytes: int = 64 << 20
    chunk_bytes: int = 8 << 20
    window: int = 4
    lease_s: float = 30.0
    hold_max_s: float = 600.0
    ticket_keys: str = ""
    call_s: float = 5.0
    stall_s: float = 5.0
    tls: Tls | None = None
    insecure: bool = False
    quotas: Quotas = field(default_factory=Quotas)

    def __post_init__(self) -> None:
        for name in ("control", "transports"):
            named = getattr(self, name)
            listed = tuple(named) if isinstance(named, list) else named
            object.__setattr__(self, name, (named,) if isinstance(named, str) else listed)
        object.__setattr__(self, "tls", _made(Tls, self.tls, "tls"))
        object.__setattr__(self, "quotas", _made(Quotas, self.quotas, "quotas"))
        _check_kinds(self)
        if not all(isinstance(options, Mapping) for options in self.transport_options.values()):
            raise MisuseError(f"transport_options are mappings by scheme, not {self.transport_options!r}")
        if not all(isinstance(text, str) for text in (*self.listen, *self.listen.values())):
            raise MisuseError(f"listen has addresses by scheme, not {self.listen!r}")
        if "auto" in self.transports and len(self.transports) > 1:
            raise MisuseError(f"auto is every transport that is installed: it stands alone, not in {self.transports}")
        if not self.worker or self.rank < 0 or not self.transports:
            have = f"worker {self.worker!r}, rank {self.rank}, transports {self.transports}"
            raise MisuseError(f"a worker name, a rank from 0 and a transport are needed, not {have}")
        unused = sorted({*self.listen, *self.transport_options} - {*self.transports})
        if unused and self.transports != ("auto",):
            raise MisuseError(f"{unused} have an address or options, but transports are {self.transports}")
        if self.mode not in ("auto", "packed", "direct"):
            raise MisuseError(f"mode must be auto, packed or direct, got {self.mode!r}")
        if self.kernel not in ("auto", *KERNELS) or (self.kernel == "native" and not native_available()):
            known = [k for k in KERNELS if k != "native" or native_available()]
            raise MisuseError(f"kernel {self.kernel!r} is not here; there are auto, {', '.join(known)}")
        if self.copy_threads < 0:
            raise MisuseError(f"copy_threads must be 0 (our choice) or more, got {self.copy_threads}")
        most = min(self.arena_bytes, LIMITS["chunk_bytes"])
        if not 4096 <= self.chunk_bytes <= most or self.arena_bytes > _ARENA_BYTES_MAX:
            have = f"chunk_bytes {self.chunk_bytes} must be in [4096, {most}]"
            raise MisuseError(f"{have}, arena_bytes {self.arena_bytes} at most {_ARENA_BYTES_MAX}")
        for name in ("lease_s", "hold_max_s", "call_s", "stall_s"):
            if not 0 < getattr(self, name) <= _SECONDS_MAX:
                bounds = f"positive and at most {_SECONDS_MAX}"
                raise MisuseError(f"{name} must be {bounds}, got {getattr(self, name)}")
        if not 1 <= self.window <= WINDOW_MESSAGES:
            room = f"in [1, {WINDOW_MESSAGES}], which every channel has room for"
            raise MisuseError(f"window must be {room}, got {self.window}")

    def reloaded(self, other: AgentConfig) -> AgentConfig:
        """The same with the ``RELOADABLE`` fields of another."""
        return replace(self, **{name: getattr(other, name) for name in RELOADABLE})

    def at_rank(self, rank: int, worker: str = "") -> AgentConfig:
        """The same for one rank of a worker: fixed ports move up by the rank."""
        return replace(
            self,
            worker=worker or self.worker,
            rank=rank,
            control=tuple(shifted(address, rank) for address in self.control),
            listen={scheme: shifted(address, rank) for scheme, address in self.listen.items()},
        )

    def window_of(self, edges: int) -> int:
        """Chunks underway on each of so many edges at once: no more than two where an arena would not hold them."""
        return min(self.window, max(2, self.arena_bytes // (self.chunk_bytes * max(1, edges))))


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """How a daemon works.

    Attributes:
        socket: path of the Unix socket for engines; its directory is made (0700), or must be this user's alone.
        worker: name of the worker among its peers; "" is what its engine says.
        health: addresses of ``grpc.health.v1`` for probes (``tcp://host:port``, ``unix:///path``).
        admin: ``HOST:PORT`` (loopback) or ``unix:///path`` of the HTTP admin; "" is none. metrics: the same for
            livez, readyz and metrics alone, at any address.
        drain_s: how long a drain waits for live leases.
        log_level: debug, info, warning or error. log_format: ``json``, ``text``, or ``auto``: text on a terminal.
        agent: how each rank's agent works; rank r of a fixed port p binds p + r. Without ``control`` a rank has a
            Unix socket beside ours, with a name that outlives a restart.
    """

    socket: str
    worker: str = ""
    health: tuple[str, ...] = ()
    admin: str = "127.0.0.1:9464"
    metrics: str = ""
    drain_s: float = 55.0
    log_level: str = "info"
    log_format: str = "auto"
    agent: AgentConfig = field(default_factory=lambda: AgentConfig(worker="engine"))

    def __post_init__(self) -> None:
        _check_kinds(self)
        if not os.path.isabs(self.socket) or len(os.fsencode(self.socket)) > 100:
            raise MisuseError(f"socket must be an absolute path of at most 100 bytes, not {self.socket!r}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise MisuseError(f"log_level must be debug, info, warning or error, not {self.log_level!r}")
        if self.log_format not in ("auto", "json", "text"):
            raise MisuseError(f"log_format must be auto, json or text, not {self.log_format!r}")
        if not 0 <= self.drain_s < 86_400:
            raise MisuseError(f"drain_s must be at least 0 and less than a day, not {self.drain_s}")
        known = {"auto", *known_schemes()}  # else the first engine would find out, and the daemon be ready before
        if unknown := [scheme for scheme in self.agent.transports if scheme not in known]:
            raise MisuseError(f"agent.transports has {unknown}; known are {', '.join(sorted(known))}")
        for address in self.agent.control:  # the same; names are resolved only where they are bound
            endpoint = Endpoint.parse(address)
            if endpoint.ip is not None:
                endpoint.check_open(endpoint.ip, allowed=self.agent.tls is not None or self.agent.insecure)

    def of_rank(self, rank: int, worker: str) -> AgentConfig:
        """The config of one attached rank's agent."""
        config = self.agent.at_rank(rank, self.worker or worker)
        if config.control:
            return config
        return replace(config, control=(f"unix://{self.socket}.{rank}",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """One life of a rank as its tickets know it: the epoch, and the key that seals them (32 bytes).

    An agent makes its own. A sidecar is given its engine's, so that what writes tickets in the engine (``RankIssuer``)
    outlives the sidecar: after a restart every old offer is unknown there (its nonce and sessions are gone), and new
    ones open. ``ticket_keys`` of the config go before the key.
    """

    epoch: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def __post_init__(self) -> None:
        if len(self.epoch) != 16 or len(self.key) != 32:
            raise MisuseError("an epoch has 16 bytes and a key 32")


def _check_kinds(config: Any) -> None:
    """Refuse values of the wrong type, which would be taken for another: the text "false" is true."""
    for each in fields(config):
        kind, value = _KINDS[each.type], getattr(config, each.name)
        texts = kind is tuple and isinstance(value, tuple) and all(isinstance(text, str) for text in value)
        if not (texts if kind is tuple else isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
            raise MisuseError(f"{each.name} can't be {value!r}; {each.type} is needed")


def _made(kind: type[_Kind], value: Any, field: str) -> _Kind | None:
    """A value of its class, or a mapping of its fields, as a file has it; raises MisuseError."""
    try:
        return kind(**value) if isinstance(value, Mapping) else value
    except TypeError as error:
        raise MisuseError(f"{field}: {error}") from error


#: What a field may hold, by its annotation.
_KINDS: Mapping[Any, Any] = {
    "AgentConfig": AgentConfig,
    "Mapping[str, Mapping[str, Any]]": Mapping,
    "Mapping[str, str]": Mapping,
    "Quotas": Quotas,
    "Tls | None": (Tls, type(None)),
    "bool": bool,
    "float": (int, float),
    "int": int,
    "str": str,
    "tuple[str, ...]": tuple,
}


def shifted(address: str, rank: int) -> str:
    """An address with its port, if that is a fixed one, moved up by ``rank``."""
    head, colon, port = address.rpartition(":")
    return f"{head}{colon}{int(port) + rank}" if colon and port.isdecimal() and int(port) else address
