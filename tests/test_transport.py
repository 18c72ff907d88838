"""Every transport against the contract, and what is special about each."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("pdxfer.testing.transport")

from pdxfer.testing.transport import TransportConformance  # noqa: E402 - after the line above, or asserts say nothing
from pdxfer.transport import Transport, create_transport  # noqa: E402


class TestMemory(TransportConformance):
    one_process = True

    def make_transport(self) -> Transport:
        return create_transport("memory")


class TestShm(TransportConformance):
    def make_transport(self) -> Transport:
        return create_transport("shm")


class TestTcp(TransportConformance):
    done_means_released = False

    def make_transport(self) -> Transport:
        return create_transport("tcp")
