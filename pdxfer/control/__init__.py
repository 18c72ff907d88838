"""The control plane: five gRPC calls between agents, carrying the values of ``pdxfer.messages`` and errors.

In goes a ``ControlHandler`` (server) or an address (client); out come dataclasses or errors of
``pdxfer.errors``. Nothing here knows tensors, layouts or transports. Importing this package costs nothing:
gRPC is loaded when one of the two classes is first touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdxfer.control.client import ControlClient
    from pdxfer.control.server import ControlServer
    from pdxfer.control.tls import Caller, Credentials, Tls

__all__ = ["Caller", "ControlClient", "ControlServer", "Credentials", "Tls"]


def __getattr__(name: str) -> object:
    if name == "ControlClient":
        from pdxfer.control.client import ControlClient

        return ControlClient
    if name == "ControlServer":
        from pdxfer.control.server import ControlServer

        return ControlServer
    if name in ("Caller", "Credentials", "Tls"):
        from pdxfer.control import tls

        return getattr(tls, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
