"""One-sided hazards: naked NIXL gives another request's bytes to whoever asks; through pdxfer nobody gets any."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from pdxfer.builders import Parallel
from pdxfer.errors import StaleError, TicketError
from pdxfer.ticket import Ticket
from tests.conftest import require
from tests.pairs import TOKENS, Ends, pair, withdraw
from tests.workers import Worker, layouts

require("nixl_cu12")

NAKED = """
import os, sys
import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config
config = nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
owner, reader, stranger = (nixl_agent(name, config) for name in ("owner", "reader", "stranger"))
block = np.full(1 << 16, 1, np.uint8)  # of request one
owner.register_memory([(block.ctypes.data, block.nbytes, 0, "")], "DRAM")
rows = [(block.ctypes.data, block.nbytes, 0)]
metadata = owner.get_agent_metadata()

def prepare(agent):
    mine = np.zeros(block.nbytes, np.uint8)
    agent.register_memory([(mine.ctypes.data, mine.nbytes, 0, "")], "DRAM")
    peer = agent.add_remote_agent(metadata)
    local = agent.get_xfer_descs([(mine.ctypes.data, mine.nbytes, 0)], "DRAM")
    return mine, agent.initialize_xfer("READ", local, agent.get_xfer_descs(rows, "DRAM"), peer)

def read(agent, mine, handle):
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    print(state, set(mine.tolist()))

mine, handle = prepare(reader)
read(reader, mine, handle)
block[:] = 2  # the owner gives the block to request two
read(reader, mine, handle)
read(stranger, *prepare(stranger))  # who holds nothing but the metadata and the address
sys.stdout.flush()
os._exit(0)
"""


def test_naked_nixl_gives_another_request_s_bytes_to_anybody():
    done = subprocess.run([sys.executable, "-c", NAKED], capture_output=True, text=True, check=False, timeout=100)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("DONE", "ERR"))]
    assert lines == ["DONE {1}", "DONE {2}", "DONE {2}"], done.stderr


@pytest.mark.parametrize("mode", ["packed", "direct"])
def test_through_pdxfer_neither_a_late_reader_nor_a_stranger_gets_a_byte(mode):
    config = {"transports": ("nixl",), "mode": mode, "transport_options": {"nixl": {"inline_bytes": 0}}}
    two = layouts(Parallel(), Parallel())
    with (
        pair(*two, **config) as (source, target),
        Worker(two[1], seed=3, worker="stranger", **config) as stranger,
    ):
        ends = Ends()
        late = source.offer("one", TOKENS, on_end=ends)
        withdraw(source, "one", ends)
        source.ranks[0].give_back("one")
        live = source.offer("two", TOKENS, on_end=ends)  # mostly in the same pages
        for reader in (target, stranger):
            before = reader.reserve("two", TOKENS).copy()
            forged = replace(Ticket.decode(live), audience="stranger").encode()
            part = replace(Ticket.decode(live).ranks[0], nonce=Ticket.decode(late).ranks[0].nonce)
            mixed = replace(Ticket.decode(live), ranks=(part,)).encode()
            for ticket in (late, forged, mixed):
                with pytest.raises((StaleError, TicketError)):
                    reader.fetch(ticket, "two")
            after = reader.memory("two")
            assert all((a == b).all() for a, b in zip(before.buffers[0], after.buffers[0], strict=True))
        target.fetch(live, "two")[0].release()
        with pytest.raises((StaleError, TicketError)):
            stranger.fetch(live, "two")
        ends.wait(1)
        stranger.check_idle()
