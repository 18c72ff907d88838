"""UCX: the contract, and what all planes hold. Run by test_transport_ucx.py, in a process without NIXL."""

from __future__ import annotations

import pytest

from pdxfer.errors import TransportError
from pdxfer.testing.transport import LONG_S, connect_pair
from pdxfer.transport import create_transport
from tests.conftest import require
from tests.planes import PlaneSuite

require("ucxx")


class TestUcx(PlaneSuite):
    scheme = "ucx"

    def test_a_peer_killed_and_back_at_its_address(self, monkeypatch):
        monkeypatch.setenv("UCX_TLS", "^cma")  # else UCX aborts this process now and then: see transport/ucx.py
        super().test_a_peer_killed_and_back_at_its_address()


@pytest.mark.parametrize("peer_failure", [False, True])
@pytest.mark.parametrize("layers", ["tcp", "all"])
def test_transports_of_ucx(layers, peer_failure):
    options = {"config": {"TLS": layers}, "peer_failure": peer_failure}
    with create_transport("ucx", **options) as left, create_transport("ucx", **options) as right:
        sender, receiver = connect_pair(left, right.listen())
        payload = bytes(range(256)) * 16384
        for _ in range(3):
            sending = sender.send_all(b"", memoryview(payload), timeout_s=LONG_S)
            with receiver.receive(timeout_s=LONG_S) as message:
                assert message.payload == payload
            sending.wait(LONG_S)


def test_settings_that_ucx_does_not_take():
    with pytest.raises(TransportError, match="UCX can't be started"):
        create_transport("ucx", config={"TLS": "carrier-pigeon"})
