"""Every transport against the contract, and what is special about each."""

from __future__ import annotations

from pdxfer.testing.transport import TransportConformance
from pdxfer.transport import Transport, create_transport


class TestMemory(TransportConformance):
    one_process = True

    def make_transport(self) -> Transport:
        return create_transport("memory")


class TestShm(TransportConformance):
    def make_transport(self) -> Transport:
        return create_transport("shm")
