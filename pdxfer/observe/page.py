"""Page: an Observer's state as one HTML page for people: no file beside it, nothing from elsewhere.

In comes an Observer; out comes HTML in which every text that a peer may have written is escaped. The page works without
scripts; its only one fetches the page again every two seconds, and the policy lets no other run.

The remap picture shows, for the pairs of layouts of the last transfers, which rank sends how much of a token's and a
request's state to which::

    source ranks ──width: share of the bytes──▶ target ranks ╮ relays among the target's ranks, dashed
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from pdxfer.plan import Edge, Plan, make_plan

if TYPE_CHECKING:
    from pdxfer.agent.journal import Timeline
    from pdxfer.observe.observer import Observer

__all__ = ["POLICY", "remap_picture", "render"]

_ROWS, _PICTURES, _RANKS = 15, 3, 16
_SCRIPT = """setInterval(async () => {
  const answer = await fetch(location.href); const text = await answer.text();
  const fresh = new DOMParser().parseFromString(text, 'text/html');
  if (answer.ok) document.querySelector('main').replaceWith(fresh.querySelector('main'));
}, 2000)"""
_STYLE = """body{font:14px/1.45 system-ui,sans-serif;margin:1.5rem auto;max-width:76rem;padding:0 1rem;color:#1c2330;
background:#fff}h1{font-size:1.35rem;margin:0}h2{font-size:1.02rem;margin:1.6rem 0 .4rem}table{border-collapse:collapse;
width:100%}th{text-align:left;font-weight:600;color:#5a6475}td,th{padding:.22rem .7rem .22rem 0;border-bottom:1px solid
#e4e8ee;vertical-align:top}td.n{font-variant-numeric:tabular-nums;white-space:nowrap}code{font:12.5px ui-monospace,
monospace;overflow-wrap:anywhere}.ok{color:#0a7a3c}.bad{color:#b3261e;font-weight:600}.dim{color:#5a6475}p{margin:.3rem
0}figure{display:inline-block;margin:0 2rem 0 0;vertical-align:top}svg text{font:12px system-ui,sans-serif;fill:#1c2330}
@media(prefers-color-scheme:dark){body{background:#14181f;color:#dde3ec}svg text{fill:#dde3ec}td,th{border-color:
#2b323d}.ok{color:#58c98a}.bad{color:#ff8a80}.dim,th{color:#98a2b3}}"""
_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; script-src 'sha256-{_HASH}'; base-uri 'none'"
)


def render(observer: Observer) -> str:
    """The page."""
    status, timelines = observer.status(), observer.timelines()
    live = [t for t in timelines if not t.outcome]
    failed = [t for t in timelines if t.reason or t.outcome in ("expired", "aborted", "declined")]
    wrong = {name: why for name, why in status["checks"].items() if why}
    ready = '<span class="bad">not ready</span>' if wrong else '<span class="ok">ready</span>'
    names = ", ".join(sorted({a["worker"] for a in status["agents"]})) or "no engine attached"
    ended = ", ".join(f"{n} {outcome}" for outcome, n in sorted(status["transfers"].items())) or "none yet"
    parts = [
        f"<h1>pdxfer: {escape(names)} is {ready}</h1>",
        f'<p class="dim">version {escape(status["version"])}, process {status["pid"]}, up {_ago(status["started_at"])}'
        f", {status['underway']} underway; transfers remembered: {escape(ended)}</p>",
        *(f'<p class="bad">{escape(name)}: {escape(why)}</p>' for name, why in wrong.items()),
        _table("Ranks", ("worker", "rank", "model", "layout", "offered", "fetching", "pages and slots"), (
            (a["worker"], f"{a['rank']} of {a['ranks']}", a["model"], a["layout"][:12], a["leases"], a["fetches"],
             ", ".join(f"{n} {state}" for state, n in sorted(a["slots"].items()) if n))
            for a in status["agents"]), "No engine is attached."),
        _table("Peers", ("worker", "our rank", "up", "completed", "failed", "bytes", "layout", "last failure"), (
            (p["worker"], p["of_rank"], "yes" if p.get("up", True) else "NO", p.get("completed", 0), p.get("failed", 0),
             _bytes(p.get("nbytes", 0)), p.get("layout", "")[:12],
             p.get("last_failure", "")) for p in status["peers"]), "No other worker has been met."),
        _table("Live transfers", _HEAD, map(_row, live[:_ROWS]), "Nothing is underway."),
        _pictures(observer, timelines),
        _table("Recent failures", ("ended", "transfer", "peer", "reason", "what failed", "what to do"),
               map(_failure, failed[:_ROWS]), "None is remembered."),
        _table("Recent transfers", _HEAD, map(_row, [t for t in timelines if t.outcome][:_ROWS]), "None yet."),
    ]  # fmt: skip
    title = f"<title>pdxfer {escape(names)}</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}<style>{_STYLE}</style>'
    body = f"<main>{''.join(parts)}</main><script>{_SCRIPT}</script>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


_HEAD = ("began", "transfer", "role", "peer", "outcome", "took", "bytes", "over", "last stage")


def _row(t: Timeline) -> Sequence[object]:
    stage = " ".join(t.marks[-1][1:] if t.marks else ("begun",))
    who, took = f"{t.role} {t.rank}", _took(t.elapsed_s)
    return (_ago(t.began_at) + " ago", t.transfer, who, t.peer, t.outcome or "live", took,
            _bytes(t.moved()[0]), t.transport, stage)  # fmt: skip


def _failure(t: Timeline) -> Sequence[object]:
    failure = t.to_json().get("failure")
    ended = _ago(t.began_at + t.elapsed_s) + " ago"
    if failure is None:
        return ended, t.transfer, t.peer, t.outcome, t.error, "see the other worker's page"
    component = f", component {failure['component']}" if failure["component"] else ""
    what = f"{failure['blame']}{component}; in: {failure['in']}. {failure['message']}"
    return ended, t.transfer, t.peer, failure["reason"], what, failure["remedy"]


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> str:
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    if not body:
        return f'<h2>{title}</h2><p class="dim">{empty}</p>'
    return f"<h2>{title}</h2><table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{body}</table>"


def _cell(cell: object) -> str:
    text = escape(str(cell))
    marked = {"failed": "bad", "NO": "bad", "completed": "ok", "yes": "ok"}.get(str(cell))
    return f'<td class="n {marked or ""}">{text}</td>' if len(text) < 24 else f"<td><code>{text}</code></td>"


def _bytes(nbytes: float) -> str:
    power = next((p for p in (3, 2, 1) if nbytes >= 1000**p), 0)
    return f"{nbytes / 1000**power:.{1 if power else 0}f} {('B', 'kB', 'MB', 'GB')[power]}"


def _took(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _ago(at: float) -> str:
    seconds = max(0.0, time.time() - at)
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )


def _pictures(observer: Observer, timelines: Sequence[Timeline]) -> str:
    found: dict[tuple[str, str], str] = {}
    for agent in observer.agents:
        ours, me = agent.memory.layout, agent.config.worker
        for t in timelines:
            theirs = agent.layouts.get(t.layout)
            if theirs is None or t.role not in ("source", "target") or len(found) >= _PICTURES:
                continue
            source, target = (me, t.peer) if t.role == "source" else (t.peer, me)
            if (source, target) not in found:
                plan = make_plan(*((ours, theirs) if t.role == "source" else (theirs, ours)))
                found[(source, target)] = remap_picture(plan, source, target)
    return f"<h2>Who sends what to whom</h2>{''.join(found.values())}" if found else ""


def remap_picture(plan: Plan, source: str, target: str) -> str:
    """A plan's edges between ranks as SVG; of more than 16 ranks the first ones."""
    weight = {
        e: sum(b * len(i.layers) for b, i in zip(plan.row_bytes[e], plan.edges[e], strict=True)) for e in plan.edges
    }
    total, ranks = (
        max(1, max(weight.values(), default=1)),
        (min(len(plan.source), _RANKS), min(len(plan.target), _RANKS)),
    )
    height = 34 * max(ranks) + 30
    y = [[30 + 34 * (n + 0.5) * max(ranks) / count for n in range(count)] for count in ranks]
    shapes = [_edge(e, y, weight[e] / total) for e in plan.edges if e.source < ranks[e.relay] and e.target < ranks[1]]
    for side, (x, word, name) in enumerate(((60, "end", source), (300, "start", target))):
        shapes.append(f'<text x="{x}" y="16" text-anchor="middle">{escape(name[:24])}</text>')
        for number, at in enumerate(y[side]):
            shapes.append(f'<circle cx="{x}" cy="{at:.0f}" r="9" fill="#2f6fde"/>')
            beside = x - 14 if word == "end" else x + 14
            shapes.append(f'<text x="{beside}" y="{at + 4:.0f}" text-anchor="{word}">{number}</text>')
    parts = ", ".join(sorted({component.name for component in plan.target.spec.components}))
    items = f"{sum(map(len, plan.edges.values()))} boxes over {len(plan.edges)} edges: {parts}"
    svg = f'<svg width="380" height="{height}" viewBox="0 0 380 {height}" role="img">{"".join(shapes)}</svg>'
    return f'<figure>{svg}<figcaption class="dim">{escape(items)}</figcaption></figure>'


def _edge(edge: Edge, y: Sequence[Sequence[float]], share: float) -> str:
    width, end = 1 + 6 * share, y[1][edge.target]
    if edge.relay:
        start = y[1][edge.source]
        path = f"M309 {start:.0f} C370 {start:.0f} 370 {end:.0f} 309 {end:.0f}"
        return f'<path d="{path}" fill="none" stroke="#d98a1f" stroke-width="{width:.1f}" stroke-dasharray="5 4"/>'
    start = y[0][edge.source]
    path = f"M69 {start:.0f} C180 {start:.0f} 180 {end:.0f} 291 {end:.0f}"
    return f'<path d="{path}" fill="none" stroke="#7aa7f0" stroke-width="{width:.1f}"/>'
