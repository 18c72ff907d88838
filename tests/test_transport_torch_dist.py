"""torch.distributed: gloo against the contract and what all planes hold; NCCL where there are two GPUs."""

from __future__ import annotations

import pytest

from pdxfer.errors import MisuseError, TransportError
from pdxfer.testing.transport import LONG_S, MIB, TransportConformance, connect_pair
from pdxfer.transport import create_transport
from tests.conftest import require
from tests.planes import PlaneSuite

torch = require("torch")


class TestGloo(PlaneSuite):
    scheme = "gloo"


def test_any_memory_can_be_sent():
    with create_transport("gloo") as left, create_transport("gloo") as right:
        sender, receiver = connect_pair(left, right.listen())
        payload = bytes(range(256)) * 4096
        sender.send_all(b"", memoryview(payload), timeout_s=LONG_S)
        assert receiver.receive(timeout_s=LONG_S).payload == payload


def test_several_pairs_at_once_and_no_default_group():
    with create_transport("gloo") as hub, create_transport("gloo") as spoke:
        listener = hub.listen()
        pairs = [connect_pair(spoke, listener) for _ in range(4)]
        regions = [spoke.allocate(MIB) for _ in pairs]
        for i, ((sender, receiver), region) in enumerate(zip(pairs, regions, strict=True)):
            region.view[:] = bytes([i]) * MIB
            sender.send_all(b"there", region.view, timeout_s=LONG_S)
            receiver.send_all(b"back", region.view, timeout_s=LONG_S)
        for i, ends in reversed(list(enumerate(pairs))):
            assert all(end.receive(timeout_s=LONG_S).payload == bytes([i]) * MIB for end in ends)
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("host", ["10.1.2.3", "localhost", "nonsense"])
def test_hosts_that_the_plane_does_not_bind_to(host):
    with pytest.raises(MisuseError, match="plane_host"):
        create_transport("gloo", plane_host=host)


def test_a_store_on_another_host_is_not_asked():
    with create_transport("gloo") as left, create_transport("gloo") as right:
        right.plane_host = "127.0.0.1"
        listener = right.listen()
        right._serve_store = lambda channel, timeout: channel.tell(b"\x92\xa9192.0.2.1\x05")
        with pytest.raises(TransportError):
            connect_pair(left, listener)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
class TestNccl(TransportConformance):
    done_means_released = False
    made = 0

    def make_transport(self):
        self.made += 1
        return create_transport("nccl", inline_bytes=0, device=f"cuda:{self.made % 2}")


def test_nccl_without_a_gpu_is_misuse():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(MisuseError, match="CUDA"):
        create_transport("nccl")
