"""Record what two agents say to each other at one commit, for ``tests/test_recorded.py``.

    git worktree add /tmp/old COMMIT
    PYTHONPATH=/tmp/old python tests/recorded/record.py tests/recorded/protocol-N.bin
    git worktree remove /tmp/old

Everything but this file is that commit's own. What is hooked are gRPC and ZMQ, not pdxfer: control calls as serialised
messages, the tcp plane as frames of its ZMQ messages, in the order in which the target saw them.
"""

from __future__ import annotations

import sys
import tempfile

import grpc
import msgpack
import zmq

from pdxfer.messages import PROTOCOL_VERSION
from pdxfer.ticket import TICKET_VERSION
from tests.pairs import TOKENS, Ends, hand_over, pair, wait_until
from tests.test_observe import ONE

events: list[list[object]] = []


def hook_control() -> None:
    """Note every call that our own service answers, with its answer."""
    real = grpc.method_handlers_generic_handler

    def noting(name, behaviour):
        def answer(request, context):
            response = behaviour(request, context)
            events.append(["call", name, bytes(request), bytes(response)])
            return response

        return answer

    def hooked(service, handlers):
        noted = {
            name: grpc.unary_unary_rpc_method_handler(noting(name, handler.unary_unary))
            for name, handler in handlers.items()
        }
        return real(service, noted)

    grpc.method_handlers_generic_handler = hooked


def hook_data() -> None:
    """Note what connecting sockets send and receive."""
    send, receive = zmq.Socket.send_multipart, zmq.Socket.recv_multipart

    def sending(self, frames, *args, **options):
        frames = list(frames)
        sent = send(self, frames, *args, **options)
        if self.type == zmq.DEALER:
            events.append(["sent", *[bytes(frame) for frame in frames]])
        return sent

    def receiving(self, *args, **options):
        frames = receive(self, *args, **options)
        if self.type == zmq.DEALER:
            events.append(["came", *[bytes(frame) for frame in frames]])
        return frames

    zmq.Socket.send_multipart, zmq.Socket.recv_multipart = sending, receiving


def decline(agent):
    """Have an agent decline a ticket."""
    return lambda ticket: agent.decline(ticket, "ABORTED")


def main(path: str) -> None:
    hook_control()
    hook_data()
    with tempfile.TemporaryDirectory(prefix="pdxfer-recorded-") as directory:
        address = f"unix://{directory}/control"
        with pair(*ONE, transports=("tcp",), of_source={"control": (address,)}) as (source, target):
            offered = source.offer
            tickets: list[str] = []

            def offer(*args, **options):
                tickets.append(offered(*args, **options))
                return tickets[-1]

            source.offer = offer
            hand_over(source, target, "recorded")
            ends = Ends()
            source.offer("declined", TOKENS, on_end=ends)
            for name, tell in (("Renew", target.agents[0].keep), ("Abort", decline(target.agents[0]))):
                tell(tickets[-1])
                assert wait_until(lambda name=name: any(event[:2] == ["call", name] for event in events), timeout_s=30)
            ends.wait(1)
            source.ranks[0].give_back("declined")
            found = {
                "protocol": PROTOCOL_VERSION, "ticket_version": TICKET_VERSION, "transfer": "recorded",
                "tokens": TOKENS, "address": address, "tickets": tickets, "events": list(events),
            }  # fmt: skip
    with open(path, "wb") as file:
        file.write(msgpack.packb(found))
    print(f"{len(found['events'])} events of protocol {PROTOCOL_VERSION}")


main(sys.argv[1])
