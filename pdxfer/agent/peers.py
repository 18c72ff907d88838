"""Peers: what this agent knows of others, and its open paths to them.

In come contact addresses; out come control clients, checked descriptions with layouts, and data channels that
are kept for the next transfer. It knows no transfer.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from pdxfer.agent.choice import Choice, Work, estimates, pick
from pdxfer.agent.probe import link_rates, memory_rates
from pdxfer.control import ControlClient, Credentials
from pdxfer.driver import PeerChannel
from pdxfer.errors import AbortedError, DeadlineError, MisuseError, PdxferError, PeerError, StaleError, TransportError
from pdxfer.layout import Layout
from pdxfer.messages import Describe, Description, check_versions
from pdxfer.transport import Channel, Transport

__all__ = ["Layouts", "Peer", "Peers"]

_LAYOUTS_MAX = 128
_IDLE_CHANNELS_MAX = 64
_KNOWN_S, _STRAY_S = 3600.0, 60.0  # how long a client is kept unused: of a peer that we know, of any other address
_CONNECT_S = 3.0
_REST_S = (5.0, 300.0)  # how long a transport that failed to connect is tried last: at first, and at most
_NEAR = ("memory", "shm", "nixl")  # that move bytes of one host without a socket
_log = logging.getLogger("pdxfer.agent")


class Layouts:
    """Layouts of other workers by digest: content-addressed, bounded, so a stale entry can't exist."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Layout] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, data: bytes) -> Layout:
        """Parse, check and keep a peer's layout; raises MisuseError."""
        layout = Layout.from_bytes(data)
        with self._lock:
            self._known[layout.digest] = layout
            self._known.move_to_end(layout.digest)
            while len(self._known) > _LAYOUTS_MAX:
                self._known.popitem(last=False)
        return layout

    def get(self, digest: str) -> Layout | None:
        """The layout, when it is known."""
        with self._lock:
            return self._known.get(digest)


@dataclass(slots=True, kw_only=True)
class Peer:
    """One peer agent in one epoch."""

    address: str
    client: ControlClient
    description: Description
    layout: Layout

    def about(self) -> dict[str, str]:
        """What a log line about it carries, as ``extra``."""
        return {"peer": self.description.worker, "epoch": self.description.epoch.hex()}


@dataclass(slots=True, kw_only=True)
class _Rest:
    """A path that did not connect: why, until when it rests and for how long, and when that was noted."""

    why: str
    reason: str
    until_s: float
    rest_s: float
    noted_s: float


class Peers:
    """All peers of one agent. Thread-safe."""

    def __init__(
        self,
        hello: Callable[[str], Describe],
        layouts: Layouts,
        transports: Mapping[str, Transport],
        host: str,
        call_s: float,
        *,
        auto: bool = False,
    ) -> None:
        self._auto = auto
        self._told: dict[tuple[str, str], str] = {}
        self._hello, self._layouts, self._transports, self._host = hello, layouts, transports, host
        self.call_s = call_s
        self._trusted: tuple[Credentials | None, bool] = (None, False)
        self._clients: dict[str, ControlClient] = {}
        self._used: dict[str, float] = {}  # address of a client -> when it was last asked for
        self._peers: dict[str, Peer] = {}
        self._idle: dict[tuple[str, bytes], list[PeerChannel]] = {}
        self._failed: dict[tuple[str, bytes], _Rest] = {}  # by path
        self._lock = threading.Lock()
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        self.falling_back: dict[str, str] = {}  # address of a peer -> the better transport that fails to it now

    def trust(self, credentials: Credentials | None, *, insecure: bool) -> None:
        """Whom to believe at addresses of other hosts; before the first call."""
        self._trusted = (credentials, insecure)

    def get(self, address: str, *, epoch: bytes | None, deadline_s: float) -> Peer:
        """Return the peer at ``address``, introducing ourselves on first contact.

        Args:
            epoch: the epoch expected there, or None for any; another one is asked for afresh.
            deadline_s: on the monotonic clock.

        Raises:
            StaleError: another epoch lives there now. PeerError: nobody answers, or it answers nonsense.
        """
        with self._lock:
            peer = self._peers.get(address)
            if peer is not None:
                self._used[address] = time.monotonic()
        if peer is None or (epoch is not None and peer.description.epoch != epoch):
            peer = self._introduce(address, deadline_s)
        if epoch is not None and peer.description.epoch != epoch:
            raise StaleError(f"the agent at {address} has restarted since the ticket was made", reason="EPOCH_CHANGED")
        return peer

    def client(self, address: str) -> ControlClient:
        """The control client for an address, connected or not; raises PeerError when it can't be an agent's."""
        with self._lock:
            if address not in self._clients:
                self._clients[address] = _client(address, *self._trusted)
            self._used[address] = time.monotonic()
            return self._clients[address]

    def _introduce(self, address: str, deadline_s: float, *, again: bool = True) -> Peer:
        with self._lock:
            known, met = self._peers.get(address), address in self._clients
        client = self.client(address)
        digest = known.description.layout_digest if known else ""
        try:
            found = client.describe(self._hello(digest), timeout_s=_time_left(deadline_s, self.call_s))
        except PeerError as error:
            if error.reason == "PEER_UNREACHABLE":
                self.drop(address, client)
                if met and again:  # it may be waiting to try again while the peer is long back
                    return self._introduce(address, deadline_s, again=False)
            raise
        except (AbortedError, MisuseError) as error:
            if error.reason == "CLIENT_CLOSED":  # under us: another call has just found out
                if again:
                    return self._introduce(address, deadline_s, again=False)
                raise PeerError(f"{address} can't be reached", reason="PEER_UNREACHABLE") from error
            raise
        check_versions(found)
        layout = self._layouts.get(found.layout_digest)
        if found.layout:
            try:
                layout = self._layouts.add(found.layout)
            except MisuseError as error:  # not ours: the peer's, or the network's
                what = f"{address} sent a layout that can't be used: {error.message}"
                raise PeerError(what, reason="PROTOCOL") from error
        if layout is None or layout.digest != found.layout_digest:
            raise PeerError(f"{address} named layout {found.layout_digest} but did not send it", reason="PROTOCOL")
        peer = Peer(address=address, client=client, description=found, layout=layout)
        with self._lock:
            self._peers[address] = peer
        if known is not None and known.description.epoch != found.epoch:
            self._close_idle(known)
        return peer

    def known(self) -> list[tuple[Peer, int]]:
        """Every peer we have met and not forgotten, with the number of idle channels to it."""
        with self._lock:
            idle = {key: len(channels) for key, channels in self._idle.items()}
            peers = list(self._peers.values())
        return [(p, sum(idle.get((a, p.description.epoch), 0) for a in p.description.transports)) for p in peers]

    def forget(self, peer: Peer) -> None:
        """Something is wrong with it: introduce ourselves anew next time, on new channels."""
        with self._lock:
            if self._peers.get(peer.address) is peer:
                del self._peers[peer.address]
        self._close_idle(peer)

    def _close_idle(self, peer: Peer) -> None:
        with self._lock:
            keys = [(address, peer.description.epoch) for address in peer.description.transports]
            channels = [channel for key in keys for channel in self._idle.pop(key, ())]
            for key in keys:
                self._failed.pop(key, None)
        for channel in channels:
            channel.close()

    def drop(self, address: str, client: ControlClient | None = None) -> None:
        """Nobody is there (behind ``client``): what a wrong or a dead address costs must not stay."""
        with self._lock:
            found = self._clients.get(address)
            if found is None or client not in (None, found):
                return
            del self._clients[address], self._used[address]
            peer = self._peers.pop(address, None)  # it holds the client, too
            self.falling_back.pop(address, None)
            for key in [key for key in self._told if key[0] == address]:
                del self._told[key]
        if peer is not None:
            self._close_idle(peer)
        found.close()

    def lend(
        self, peer: Peer, deadline_s: float, work: Callable[[], Work], *, fresh: bool = False
    ) -> tuple[str, PeerChannel, Choice]:
        """Return an address and a channel to it for one transfer: an idle one, or (``fresh``) a new one; and why.

        Transports are tried best first, as our config orders them or (auto) by estimate; a slower one is taken with a
        warning, once for each peer. One that did not connect is tried last for a while, and then by one caller alone:
        a time-out is not to be paid at each hand-off.

        Raises:
            TransportError: none of the common transports connects. MisuseError: there is no common one.
        """
        epoch = peer.description.epoch
        why, seconds, candidates = self._ordered(peer, work)
        resting = self._resting(epoch, candidates)
        failures = {scheme: rest.why for scheme, rest in resting.items()}
        for scheme, address in sorted(candidates, key=lambda candidate: candidate[0] in resting):
            better = [s for s, _ in candidates[: candidates.index((scheme, address))] if s in failures]
            if better:
                why = f"{', '.join(better)} does not connect"
            choice = Choice(transport=scheme, why=why, seconds=seconds, slow=bool(better) or self._far(peer, scheme))
            # Where a transfer is opened on the channel, its first message shows whether anybody is there.
            channel = None if fresh else self._reuse(address, epoch, look=not self._transports[scheme].same_user)
            if channel is None:
                try:
                    channel = PeerChannel(self._connect(peer, scheme, address, deadline_s))
                except (TransportError, DeadlineError, MisuseError) as error:
                    failures[scheme] = error.message
                    self.fallbacks[(scheme, error.reason)] += 1
                    continue
            self._connected(peer, scheme, address)
            self.fallbacks.update((name, resting[name].reason) for name in better if name in resting)
            return address, channel, choice
        if failures:
            raise TransportError(
                f"no data path to {peer.address}: {'; '.join(f'{s}: {why}' for s, why in failures.items())}",
                hint="is the peer's process alive and its socket reachable?",
            )
        has = f"it has {peer.description.transports}, we have {sorted(self._transports)}"
        raise MisuseError(f"no transport in common with {peer.address}: {has}")

    def _resting(self, epoch: bytes, candidates: list[tuple[str, str]]) -> dict[str, _Rest]:
        """Transports that did not connect and whose time to be tried again has not come, or that another one tries."""
        now_s, found = time.monotonic(), dict[str, _Rest]()
        with self._lock:
            for scheme, address in candidates:
                if (rest := self._failed.get((address, epoch))) is None:
                    continue
                if now_s < rest.until_s:
                    found[scheme] = rest
                else:
                    rest.until_s = now_s + _CONNECT_S  # this caller tries it
        return found

    def _connect(self, peer: Peer, scheme: str, address: str, deadline_s: float) -> Channel:
        """Connect; a failure is remembered with the path, warned of once, and told where ``falling_back`` is read."""
        path, began_s = (address, peer.description.epoch), time.monotonic()
        try:
            return self._transports[scheme].connect(address, timeout_s=_time_left(deadline_s, _CONNECT_S))
        except (TransportError, DeadlineError, MisuseError) as error:
            with self._lock:
                now_s, rest_s, last = time.monotonic(), _REST_S[0], self._failed.get(path)
                if last is not None:  # one that was noted while we tried is the same failure
                    rest_s = last.rest_s if began_s < last.noted_s else min(2 * last.rest_s, _REST_S[1])
                self._failed[path] = _Rest(
                    why=error.message, reason=error.reason, until_s=now_s + rest_s, rest_s=rest_s, noted_s=now_s
                )
                self.falling_back.setdefault(peer.address, scheme)
            self._warn(peer, f"transport {scheme} does not connect, the next is tried: {error.message}")
            raise

    def _connected(self, peer: Peer, scheme: str, address: str) -> None:
        with self._lock:
            self._failed.pop((address, peer.description.epoch), None)
            if self.falling_back.get(peer.address) == scheme:
                del self.falling_back[peer.address]

    def _ordered(self, peer: Peer, work: Callable[[], Work]) -> tuple[str, dict[str, float], list[tuple[str, str]]]:
        """Why, estimates, and (scheme, address) of the transports in common, best first."""
        near = peer.description.host == self._host
        common = [
            (scheme, address)
            for scheme in self._transports
            for address in peer.description.transports
            if address.startswith(f"{scheme}://") and (near or scheme != "shm")
        ]
        if not near:  # containers of one pod are unlike hosts, too, but share its loopback: last, and not never
            common.sort(key=lambda candidate: _stays(self._transports[candidate[0]], candidate[1]))
        if not self._auto or len({scheme for scheme, _ in common}) < 2:
            return ("the first of ours that both have" if len(common) > 1 else "the only one in common"), {}, common
        if not near:
            return "another host: by what such transports can do, nothing is measured", {}, common
        best: dict[str, float] = {}
        seconds: dict[str, float] = {}
        for scheme, _ in common:
            transport = self._transports[scheme]
            found = estimates(
                work(), memory_rates(), link_rates(transport), direct=transport.can_export, mapped=transport.same_user
            )
            seconds.update({f"{scheme} {mode}": s for mode, s in found.items()})
            best[scheme] = min(found.values())
        first, why = pick(best)
        return why, seconds, sorted(common, key=lambda candidate: candidate[0] != first)

    def _far(self, peer: Peer, scheme: str) -> bool:
        """Whether bytes leave this host's memory for a peer that is on it; says so, once."""
        if peer.description.host != self._host or scheme in _NEAR:
            return False
        has = [address.partition("://")[0] for address in peer.description.transports]
        if "shm" not in has or "shm" not in self._transports:
            self.fallbacks[("shm", "NOT_IN_COMMON")] += 1
            self._warn(
                peer,
                f"it is on this host, but shm is not in common (it has {has}, we have {[*self._transports]}):"
                f" bytes go over {scheme}, several times as slow",
            )
        return True

    def _warn(self, peer: Peer, what: str) -> None:
        """Warn of a slow path, once for each peer and kind."""
        key = (peer.address, what.partition(":")[0])
        with self._lock:
            first = key not in self._told
            self._told[key] = what
        if first:
            _log.warning("slow data path to %s: %s", peer.address, what, extra=peer.about())

    def note(self, peer: Peer, choice: Choice) -> None:
        """An edge has been opened as chosen: log it at INFO when it is new for this peer."""
        key, what = (peer.address, "chosen"), f"{choice.transport} {choice.mode}"
        with self._lock:
            new = self._told.get(key) != what
            self._told[key] = what
        if new:
            _log.info("data path to %s: %s", peer.address, choice, extra=peer.about())

    def _reuse(self, address: str, epoch: bytes, *, look: bool) -> PeerChannel | None:
        with self._lock:
            idle = self._idle.get((address, epoch), [])
            while idle:
                found = idle.pop()
                if _alive(found) if look else not found.channel.closed:
                    found.uses += 1
                    return found
        return None

    def sweep(self) -> None:
        """Close idle channels whose peer has gone: nobody else would look at them before the next transfer. Close
        clients that nobody has asked for since: those of the dead and replaced would otherwise pile up.
        """
        now_s = time.monotonic()
        with self._lock:
            for key, idle in list(self._idle.items()):
                self._idle[key] = [channel for channel in idle if _alive(channel)]
                if not self._idle[key]:
                    del self._idle[key]
            for path in [path for path, rest in self._failed.items() if now_s > rest.until_s + _REST_S[1]]:
                del self._failed[path]
            unused = {address: now_s - self._used[address] for address in self._clients}
            bounds = {address: _KNOWN_S if address in self._peers else _STRAY_S for address in unused}
        for address, unused_s in unused.items():
            if unused_s > bounds[address]:
                self.drop(address)

    def give_back(self, peer: Peer, address: str, channel: PeerChannel) -> None:
        """Keep a channel whose transfer ended well."""
        with self._lock:
            idle = self._idle.setdefault((address, peer.description.epoch), [])
            if not channel.channel.closed and sum(map(len, self._idle.values())) < _IDLE_CHANNELS_MAX:
                idle.append(channel)
                return
        channel.close()

    def close(self) -> None:
        """Close every idle channel and control client."""
        with self._lock:
            channels = [c for idle in self._idle.values() for c in idle]
            clients = list(self._clients.values())
            self._idle, self._clients, self._peers, self._used = {}, {}, {}, {}
        for channel in channels:
            channel.close()
        for client in clients:
            client.close()


def _stays(transport: Transport, address: str) -> bool:
    """Whether this way ends at its own host: a loopback address, or a plane that may not leave."""
    host = address.partition("://")[2].partition("/")[0].rpartition(":")[0].strip("[]")
    with suppress(ValueError):
        return not transport.reaches_hosts or ipaddress.ip_address(host).is_loopback
    return not transport.reaches_hosts or host == "localhost"


def _alive(idle: PeerChannel) -> bool:
    """Whether the other end is there, as far as can be told now; a dead channel is closed."""
    try:
        idle.channel.receive(timeout_s=0.0).release()  # an idle channel has nothing to say; a late Fail is dropped
    except DeadlineError:
        return True
    except PdxferError:
        idle.close()
    return not idle.channel.closed


def _client(address: str, credentials: Credentials | None, insecure: bool) -> ControlClient:
    try:
        return ControlClient(address, credentials=credentials, insecure=insecure)
    except MisuseError as error:  # it came in a ticket, or from a peer
        raise PeerError(f"{address!r} can't be the address of an agent: {error.message}", reason="PROTOCOL") from error


def _time_left(deadline_s: float, cap_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineError("out of time before the peer was asked")
    return min(left_s, cap_s)
