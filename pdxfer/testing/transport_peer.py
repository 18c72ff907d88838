"""The other process of the conformance suite: connects, then does what each header says, until the path ends.

    python -m pdxfer.testing.transport_peer SCHEME ADDRESS [MODULE]

MODULE, if given, is imported first (a backend that is not installed can put itself into reach).

=============  ==================================================================================
header         answer
=============  ==================================================================================
``echo``       ``echo`` with the same payload, from a region of this process
``hold``       ``held``; the message is never released
``export``     a registered region of 1 MiB in which byte i is ``i % 251``, header ``region``
``free``       ``freed``, after the exported region was closed
=============  ==================================================================================
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress

import numpy as np

from pdxfer.errors import TransportError
from pdxfer.transport import Channel, Region, Transport, create_transport

__all__ = ["EXPORT_NBYTES", "main"]

EXPORT_NBYTES = 1 << 20
_TIMEOUT_S = 60.0


def main(arguments: list[str]) -> int:
    """Serve one channel; returns 0 when the peer went away."""
    scheme, address, *modules = arguments
    for module in modules:
        importlib.import_module(module)
    options = {"insecure": True} if scheme == "tcp" else {}  # the suite may run us on another host
    with create_transport(scheme, **options) as transport:
        channel = transport.connect(address, timeout_s=_TIMEOUT_S)
        with suppress(TransportError):  # the suite closes its end, as it does
            _serve(transport, channel)
    return 0


def _serve(transport: Transport, channel: Channel) -> None:
    held = []
    region: Region | None = None
    while True:
        message = channel.receive(timeout_s=_TIMEOUT_S)
        if message.header == b"echo":
            _echo(transport, channel, message.payload)
            message.release()
        elif message.header == b"hold":
            held.append(message)
            channel.send_all(b"held", timeout_s=_TIMEOUT_S)
        elif message.header == b"export":
            region = transport.register(
                bytearray((np.arange(EXPORT_NBYTES) % 251).astype(np.uint8).tobytes()), "pattern"
            )
            channel.export_region(region, b"region", timeout_s=_TIMEOUT_S)
        elif message.header == b"free" and region is not None:
            region.close()
            channel.send_all(b"freed", timeout_s=_TIMEOUT_S)


def _echo(transport: Transport, channel: Channel, payload: memoryview) -> None:
    with transport.allocate(max(1, payload.nbytes), "echo") as region:
        region.view[: payload.nbytes] = payload
        channel.send_all(b"echo", region.view[: payload.nbytes], timeout_s=_TIMEOUT_S).wait(_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
