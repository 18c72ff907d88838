"""``pdxfer proxy``: the router of ``pdxfer.proxy`` as a process, until a signal ends it.

In come addresses; out goes one line with the bound address, on stdout, and the log on stderr. Exit code 0 after SIGTERM
or SIGINT.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pdxfer.proxy import Proxy

__all__ = ["proxy"]


@click.command()
@click.option("--prefill", multiple=True, required=True, metavar="URL", help="A prefill server; repeat for more.")
@click.option("--decode", multiple=True, required=True, metavar="URL", help="A decode server; repeat for more.")
@click.option("--listen", default="127.0.0.1:8000", show_default=True, help="HOST:PORT to bind; port 0 is a free one.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds for which a server may send nothing before its request is given up.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the address as one JSON object.")
def proxy(prefill: tuple[str, ...], decode: tuple[str, ...], listen: str, timeout: float, as_json: bool) -> None:
    """Route OpenAI requests through a prefill and a decode server.

    /v1/completions and /v1/chat/completions go to a prefill server for one token and, with the kv_transfer_params that
    it answers, to a decode server, whose answer the client gets. Requests for several sequences (n, best_of, beam
    search, several prompts) go straight to decode, without a hand-off. /v1/models and /health are answered too.

    For demos and tests: there is no authentication, and no load is balanced beyond taking turns.
    """
    import asyncio
    import logging

    from pdxfer.proxy import Proxy

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(_serve(Proxy(prefill=prefill, decode=decode, listen=listen, timeout_s=timeout), as_json))


async def _serve(router: Proxy, as_json: bool) -> None:
    import asyncio
    import signal

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with router:
        click.echo(json.dumps({"listen": router.url}) if as_json else f"listening on {router.url}")
        await stop.wait()
