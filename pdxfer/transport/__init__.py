"""Transports by scheme: a table of the built-in ones plus the entry points of group ``pdxfer.transports``.

In comes a scheme, out goes a Transport; naming the choices imports none of them. The contract is in
``base.py``; the suite that every transport passes is ``pdxfer.testing.transport``.

An entry point's name is the scheme and its object a ``Transport`` class. It can't replace a built-in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pdxfer.errors import MisuseError
from pdxfer.transport.base import (
    MAX_HEADER_BYTES,
    WINDOW_MESSAGES,
    Address,
    Channel,
    Listener,
    Message,
    Sending,
    Transport,
    format_address,
    parse_address,
)
from pdxfer.transport.regions import Region, RegionDescriptor, RemoteRegion

__all__ = [
    "MAX_HEADER_BYTES",
    "NETWORK_SCHEMES",
    "WINDOW_MESSAGES",
    "Address",
    "Channel",
    "Listener",
    "Message",
    "Region",
    "RegionDescriptor",
    "RemoteRegion",
    "Sending",
    "Transport",
    "create_transport",
    "format_address",
    "known_schemes",
    "parse_address",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuiltIn:
    module: str
    name: str
    install: str = ""  # what to install when an import of the module fails


_BUILT_IN = {
    "gloo": _BuiltIn(module="pdxfer.transport.torch_dist", name="GlooTransport", install="pdxfer[torch]"),
    "memory": _BuiltIn(module="pdxfer.transport.memory", name="MemoryTransport"),
    "nccl": _BuiltIn(module="pdxfer.transport.torch_dist", name="NcclTransport", install="pdxfer[torch]"),
    "nixl": _BuiltIn(module="pdxfer.transport.nixl", name="NixlTransport", install="pdxfer[nixl]"),
    "shm": _BuiltIn(module="pdxfer.transport.shm", name="ShmTransport"),
    "tcp": _BuiltIn(module="pdxfer.transport.tcp", name="TcpTransport", install="pyzmq"),
    "ucx": _BuiltIn(module="pdxfer.transport.ucx", name="UcxTransport", install="pdxfer[ucx]"),
}


#: Those whose listeners are ZMQ's, with its options: ``curve``, ``curve_keys``, ``insecure``, ``contact_host`` ...
NETWORK_SCHEMES = frozenset({"gloo", "nccl", "nixl", "tcp", "ucx"})


def known_schemes() -> dict[str, str]:
    """Return every scheme that ``create_transport`` takes, with where it comes from; imports no transport."""
    schemes = {scheme: f"{entry.module}:{entry.name}" for scheme, entry in _BUILT_IN.items()}
    return {**{name: point.value for name, point in _plugins().items()}, **schemes}


def create_transport(scheme: str, **options: Any) -> Transport:
    """Create the transport for ``scheme``; options go to its constructor.

    Raises:
        MisuseError: unknown scheme (the message lists the known ones), an option it doesn't have, or a library
            it needs that is not installed (the hint names the extra).
    """
    transport = _load(scheme)
    try:
        return transport(**options)
    except TypeError as error:
        raise MisuseError(f"the {scheme} transport can't be made with {sorted(options)}: {error}") from error
    except ImportError as error:
        raise _missing(scheme, error) from error


def _load(scheme: str) -> type[Transport]:
    built_in, plugin = _BUILT_IN.get(scheme), _plugins().get(scheme)
    try:
        if built_in:
            found = getattr(import_module(built_in.module), built_in.name)
        elif plugin:
            found = plugin.load()
        else:
            extras = ", ".join(
                f"{name} (pip install {b.install})" if b.install else name for name, b in _BUILT_IN.items()
            )
            known = ", ".join([extras, *sorted(_plugins())])
            raise MisuseError(
                f"no transport for scheme {scheme!r}; known are {known}",
                hint="other packages add transports by an entry point in group pdxfer.transports",
            )
    except ImportError as error:
        raise _missing(scheme, error) from error
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise MisuseError(f"the entry point for scheme {scheme!r} is {found!r}, not a Transport class")
    return found


def _missing(scheme: str, error: ImportError) -> MisuseError:
    install = _BUILT_IN[scheme].install if scheme in _BUILT_IN else ""
    hint = f"pip install '{install}'" if install else ""
    return MisuseError(f"the {scheme} transport needs a library that is missing: {error}", hint=hint)


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="pdxfer.transports") if point.name not in _BUILT_IN}
