"""One process of the demo: a prefill rank, a decode rank, or the single-process run that both are compared with.

In come a ``Job`` and a link to the parent, which plays the router; out go a ticket, states, logits and figures. A rank
is an engine as any other: it owns its caches, its scheduler is a script, and it knows pdxfer by ``agent`` and
``connectors.hf`` alone. ``hand_over`` and ``take_over`` are all of pdxfer that an engine has to call.

::

    prefill rank   built ─ prefill ─ write_cache ─ state ─ offer ─▶ ticket ······ offer ended ······ end ─▶ ended
    parent                                                     │ joins tickets
    decode rank    built ·······································▶ fetch ─ all ready? ─ state ─ generate ─ end ─▶ ended

The offer and the fetch are done ``ROUNDS`` times: agents meet for the first time only once in their lives.
Messages are msgpack. A rank leaves by ``os._exit``: gloo's threads sometimes abort an interpreter that ends by itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import numpy.typing as npt

from pdxfer.builders import Storage
from pdxfer.errors import DeadlineError, InternalError, PdxferError, PeerError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from pdxfer.agent import Agent, Received, SidecarAgent
    from pdxfer.connectors.hf import PagedCaches, PageTables
    from pdxfer.layout import Layout

__all__ = ["PATIENCE_S", "PRELOAD", "ROUNDS", "Job", "Link", "array_from", "array_to", "rank_main"]

#: Hand-offs of the same request: the first finds the peers, later ones show what every request costs.
ROUNDS = 2

#: Agents are patient: there are more ranks than cores here, and all of them load torch.
PATIENCE_S = 30.0

#: What every process of the demo needs and what takes seconds to import; nothing here starts a thread.
PRELOAD = (
    "torch.distributed",
    "transformers.models.auto.modeling_auto",
    "transformers.models.falcon_h1.modeling_falcon_h1",
    "transformers.models.kimi_linear.modeling_kimi_linear",
    "transformers.models.nemotron_h.modeling_nemotron_h",
    "transformers.models.qwen3_next.modeling_qwen3_next",
    "pdxfer.connectors.hf",
    "pdxfer.demo.tp",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process does.

    Attributes:
        role: ``prefill``, ``decode`` or ``reference``.
        rank, tp: of its worker. tp_sizes: of both workers, since they choose the model's variant.
        steps: tokens to generate after the one that prefill samples.
        transports: data transports of its agent, best first.
        directory: where sockets and the meeting point of gloo lie; the parent removes it.
        timeout_s: bound of each wait. sidecar: socket of the daemon that its agent lives in; "" is its own process.
    """

    role: str
    rank: int
    tp: int
    tp_sizes: tuple[int, int]
    model: str
    seed: int
    prompt_tokens: int
    steps: int
    page_tokens: int
    transports: tuple[str, ...]
    directory: str
    timeout_s: float
    sidecar: str = ""

    @property
    def name(self) -> str:
        """For people: ``prefill rank 3``."""
        return self.role if self.role == "reference" else f"{self.role} rank {self.rank}"


class Link:
    """Messages between the parent and one process: an event's name and plain values, as msgpack."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def send(self, event: str, **values: Any) -> None:
        """Send one event; raises PeerError when the other side is gone."""
        try:
            self.connection.send_bytes(msgpack.packb([event, values]))
        except OSError as error:
            raise PeerError(f"could not say {event!r}: {error}") from error

    def receive(self, event: str, timeout_s: float) -> dict[str, Any]:
        """Wait for ``event`` and return its values.

        Raises:
            PdxferError: what the other side reported instead, as the class it reported.
            PeerError: the other side is gone or said something else. DeadlineError: it said nothing.
        """
        try:
            if not self.connection.poll(timeout_s):
                raise DeadlineError(f"no {event!r} came within {timeout_s:g} s")
            found, values = msgpack.unpackb(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise PeerError(f"ended before it said {event!r}") from error
        if found == "error":
            raise _error_from(values)
        if found != event:
            raise PeerError(f"said {found!r} where {event!r} was due")
        return dict(values)


def _error_values(error: PdxferError) -> dict[str, Any]:
    return {"reason": error.reason, "message": error.message, "hint": error.hint, "exit_code": error.exit_code}


def _error_from(values: dict[str, Any]) -> PdxferError:
    error = PdxferError(values["message"], hint=values["hint"], reason=values["reason"])
    error.exit_code = values["exit_code"]
    return error


def array_to(array: npt.NDArray[Any]) -> list[Any]:
    """An array as plain values; ``array_from`` is its inverse."""
    return [array.dtype.str, list(array.shape), array.tobytes()]


def array_from(values: list[Any]) -> npt.NDArray[Any]:
    """Read-only array of what ``array_to`` made."""
    dtype, shape, data = values
    array: npt.NDArray[Any] = np.frombuffer(data, dtype=dtype).reshape(shape)
    return array


def rank_main(job: Job, connection: Connection) -> None:
    """Run one process of the demo to its end; never returns."""
    os.dup2(2, 1)  # the parent's standard output is the report's alone
    link, code = Link(connection), 1
    try:
        tempfile.tempdir = job.directory
        _prepare_torch()
        _ROLES[job.role](job, link)
        code = 0
    except PdxferError as error:
        _report(link, job, error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
        traceback.print_exc()
        _report(link, job, InternalError(f"{type(error).__name__}: {error}"))
    finally:
        sys.stderr.flush()
        os._exit(code)


def _report(link: Link, job: Job, error: PdxferError) -> None:
    try:
        link.send("error", **{**_error_values(error), "message": f"{job.name}: {error.message}"})
    except PdxferError:
        print(f"{job.name}: {error}", file=sys.stderr)  # the parent is gone


def _prepare_torch() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)  # ranks share the machine's cores, and the tensors are tiny
    transformers.logging.set_verbosity_error()


# -- the engine of a rank ------------------------------------------------------------------------------


def _prompt(job: Job) -> torch.Tensor:
    import torch

    from pdxfer.demo.models import VOCABULARY

    generator = torch.Generator().manual_seed(job.seed + 1)
    return torch.randint(0, VOCABULARY, (1, job.prompt_tokens), generator=generator)


def _build(job: Job) -> tuple[PretrainedConfig, PreTrainedModel]:
    """The full config, and this rank's model."""
    from pdxfer.demo import models, tp

    config = models.demo_config(job.model, job.tp_sizes)
    full = models.build_model(config, job.seed)
    if job.role == "reference":
        return config, full
    if job.tp > 1:
        tp.init_gloo(job.rank, job.tp, f"{job.directory}/{job.role}.gloo", timeout_s=job.timeout_s)
    return config, tp.shard_model(full.state_dict(), config, job.rank, job.tp)


def _step(model: PreTrainedModel, tokens: torch.Tensor, cache: Any) -> npt.NDArray[np.float32]:
    """Logits of the last token, ``[vocabulary]``."""
    import torch

    from pdxfer.connectors.hf import forward

    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = forward(model, tokens, cache)[0, -1].numpy()
    return logits


def _generate(model: PreTrainedModel, cache: Any, token: int, steps: int) -> npt.NDArray[np.float32]:
    """Feed ``token``, then greedily what comes: logits ``[steps, vocabulary]``."""
    import torch

    logits = []
    for _ in range(steps):
        logits.append(_step(model, torch.tensor([[token]]), cache))
        token = int(logits[-1].argmax())
    return np.stack(logits)


def _layout(job: Job, config: PretrainedConfig) -> Layout:
    """The two workers differ in all that a layout can differ in without changing a bit."""
    from pdxfer.connectors.hf import layout_for_model

    pages = (ROUNDS + 1) * -(-job.prompt_tokens // job.page_tokens)  # more than is needed: tables are scattered
    if job.role == "prefill":
        storage = Storage(page_tokens=job.page_tokens, pages=pages, slots=4, latent_packed=False, taps_before=1)
        return layout_for_model(config, job.tp, storage, "per_layer")
    storage = Storage(
        page_tokens=job.page_tokens, pages=pages, slots=4, kv_order="HND", kv_packed=True, conv_order="TC",
        state_order="VK", taps_after=2,
    )  # fmt: skip
    return layout_for_model(config, job.tp, storage, "per_request")


def _start_agent(job: Job, layout: Layout) -> tuple[Agent | SidecarAgent, PagedCaches]:
    from pdxfer.agent import AgentConfig, create_agent
    from pdxfer.connectors.hf import PagedCaches

    config = AgentConfig(
        worker=job.role, rank=job.rank, transports=job.transports, call_s=PATIENCE_S, stall_s=PATIENCE_S
    )
    agent = create_agent(config, job.sidecar)
    regions = agent.allocate(layout.ranks[job.rank])
    agent.attach(layout, regions)
    agent.start()
    return agent, PagedCaches(layout, job.rank, [region.view for region in regions], seed=job.seed)


def _state(paged: PagedCaches, tables: PageTables, tokens: int) -> list[Any]:
    """All that the rank holds of a request, in logical coordinates: component, layer, box, bits."""
    found = []
    for layer, component in paged.components():
        box = paged.holding(component.name, layer).box
        bits = paged.read(component.name, layer, tables, tokens)
        found.append([component.name, layer, box.starts, box.stops, array_to(bits)])
    return found


# -- roles ---------------------------------------------------------------------------------------------


def _reference(job: Job, link: Link) -> None:
    from pdxfer.connectors.hf import new_cache
    from pdxfer.models import spec_from_config

    config, model = _build(job)
    link.send("built", spec=spec_from_config(config.to_dict()).to_json())
    cache = new_cache(model.config)
    first = _step(model, _prompt(job), cache)
    rest = _generate(model, cache, int(first.argmax()), job.steps)
    link.send("result", logits=array_to(np.concatenate([first[None], rest])))
    link.receive("end", job.timeout_s)
    link.send("ended")


def _prefill(job: Job, link: Link) -> None:
    from pdxfer.connectors.hf import new_cache, write_cache

    config, model = _build(job)
    agent, paged = _start_agent(job, _layout(job, config))
    with agent:
        link.send("built")
        cache = new_cache(model.config)
        started_s = time.perf_counter()
        logits = _step(model, _prompt(job), cache)
        prefill_s = time.perf_counter() - started_s
        tables = paged.allocate(job.prompt_tokens)
        write_cache(paged, tables, cache, job.prompt_tokens)
        state = _state(paged, tables, job.prompt_tokens)
        link.send("state", state=state, logits=array_to(logits), prefill_s=prefill_s)
        for number in range(ROUNDS):
            ticket, ended = hand_over(agent, f"demo-{number}", tables, job.prompt_tokens, int(logits.argmax()))
            link.send("offered", ticket=ticket)
            link.send("offer ended", outcome=ended(job.timeout_s))
        link.receive("end", job.timeout_s)
        paged.free(tables)
        _check_idle(agent, paged)
        link.send("ended")


def hand_over(
    agent: Agent | SidecarAgent, transfer: str, tables: PageTables, tokens: int, sampled: int
) -> tuple[str, Callable[[float], str]]:
    """Offer a prefilled request. Its pages are not to be touched before the offer has ended.

    Returns:
        This rank's ticket, and a function that waits for the end and says how it ended.
    """
    outcomes: list[str] = []
    over = threading.Event()

    def on_end(_transfer: str, outcome: str) -> None:
        outcomes.append(outcome)
        over.set()

    def ended(timeout_s: float) -> str:
        if not over.wait(timeout_s):
            raise DeadlineError(f"the offer did not end within {timeout_s:g} s")
        return outcomes[0]

    # transformers' state has seen every token whose K and V are cached; decode goes on with the sampled one
    numbers = {name: table.tolist() for name, table in tables.items()}
    ticket = agent.offer(transfer, numbers, kv_tokens=tokens, state_tokens=tokens, sampled=(sampled,), on_end=on_end)
    return ticket.encode(), ended


def _decode(job: Job, link: Link) -> None:
    from pdxfer.connectors.hf import read_cache

    config, model = _build(job)
    agent, paged = _start_agent(job, _layout(job, config))
    requests = []
    with agent:
        link.send("built", address=agent.address)
        for _ in range(ROUNDS):
            order = link.receive("fetch", job.timeout_s)
            agent.siblings.update({int(rank): address for rank, address in order["siblings"]})
            tables, received = take_over(agent, paged, order["ticket"], job.prompt_tokens, job)
            requests.append((tables, received))
            link.send("state", state=_state(paged, tables, job.prompt_tokens), **_figures(agent, received))
        cache = read_cache(paged, tables, model.config, job.prompt_tokens)
        link.send("result", logits=array_to(_generate(model, cache, received.ticket.sampled[-1], job.steps)))
        link.receive("end", job.timeout_s)
        for tables, received in requests:
            paged.free(tables)
            received.release()
        _check_idle(agent, paged)
        link.send("ended")


def take_over(
    agent: Agent | SidecarAgent, paged: PagedCaches, ticket: str, tokens: int, job: Job
) -> tuple[PageTables, Received]:
    """Fetch a request into pages of our own; returns once every rank of this worker has its share.

    A request runs on all ranks or on none. Here a rank that fails tells the parent, which ends the others; a server's
    scheduler would let all ranks free their pages and send the request to prefill again.
    """
    tables = paged.allocate(tokens)
    numbers = {name: table.tolist() for name, table in tables.items()}
    received = agent.fetch(ticket, numbers, timeout_s=job.timeout_s)
    _wait_for_all(job)
    return tables, received


def _wait_for_all(job: Job) -> None:
    import torch.distributed as dist

    if job.tp > 1:
        dist.barrier()


def _figures(agent: Agent | SidecarAgent, received: Received) -> dict[str, Any]:
    """What the fetch cost, as plain values."""
    edges = [
        {
            "relay": e.relay, "transport": e.transport, "mode": e.mode, "seconds": dict(e.seconds),
            "messages": e.messages, "component_bytes": dict(e.component_bytes),
            "carried": _carried(agent, received, (e.source, e.target, e.relay)),
        }
        for e in received.edges
    ]  # fmt: skip
    return {"edges": edges, "seconds": dict(received.seconds)}


def _carried(agent: Agent | SidecarAgent, received: Received, ends: tuple[int, int, bool]) -> list[list[str]]:
    """Names of the components in each message of an edge."""
    from pdxfer.packing import EdgeProgram
    from pdxfer.pages import RequestShape
    from pdxfer.plan import Edge

    ticket = received.ticket
    shape = RequestShape(kv_tokens=ticket.kv_tokens, state_tokens=ticket.state_tokens)
    program = EdgeProgram(received.plan, Edge(*ends), shape, chunk_bytes=agent.config.chunk_bytes)
    return [sorted({program.items[s.item].component for s in chunk.segments}) for chunk in program.chunks]


def _check_idle(agent: Agent | SidecarAgent, paged: PagedCaches) -> None:
    """Nothing may be lost or left held once the request is over."""
    agent.check_integrity()
    paged.check_integrity()
    free = paged.free_pages()
    if held := {pool: n for pool, n in paged.totals().items() if free[pool] != n}:
        raise InternalError(f"pages are still held after the request: {sorted(held)}")


_ROLES: dict[str, Callable[[Job, Link], None]] = {"decode": _decode, "prefill": _prefill, "reference": _reference}
