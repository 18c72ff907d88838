"""Reports of benches as one HTML file that needs nothing else, and as a picture.

In come files that ``--json`` wrote; out come plots of their rows and tables of everything. Several files are put beside
each other, so that two machines or two versions can be compared by eye.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdxfer.bench.compare import load
from pdxfer.errors import MisuseError

__all__ = ["write_report"]

_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:76em;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:12px;display:block;overflow-x:auto}h2{margin-top:2em}"
    "td,th{border-bottom:1px solid #ddd;padding:3px 8px;text-align:right;white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}.misses{color:#b00020}.holds{color:#1b7f3b}"
)
#: x, y, and what one line is, of the plots that rows with these fields give.
_LINES = (
    ("block_size", "bw_gb_per_s", ("transport", "op_type", "batch_size")),
    ("tokens", "p50_ms", ("row", "transport")),
    ("concurrency", "gb_per_s", ("row", "transport")),
    ("ranks", "cold_p50_ms", ("placement",)),
    ("layers", "cold_p50_ms", ("placement",)),
    ("tokens", "request_p50_ms", ("placement",)),
)
_MARKS = {True: "holds", False: "misses", None: "absent"}
_HIDDEN = ("seed", "kind", "placement", "fragmentation", "model")


def write_report(inputs: Sequence[str], output: str) -> list[str]:
    """Write ``output`` (.html, with a .png of the plots beside it; or .png alone); returns what was written.

    Raises:
        MisuseError: no such file, not a bench's, or an output of another kind.
        ModuleNotFoundError: matplotlib is missing (extra ``bench``).
    """
    path = Path(output)
    if path.suffix not in (".html", ".png"):
        raise MisuseError(f"{output} is neither .html nor .png")
    reports = {Path(name).stem if len(inputs) > 1 else "": load(name) for name in inputs}
    picture = _plots(reports)
    try:
        path.with_suffix(".png").write_bytes(picture)
        if path.suffix == ".html":
            path.write_text(_page(reports, picture), encoding="utf-8")
    except OSError as error:
        raise MisuseError(f"can't write {output}: {error.strerror}") from error
    return sorted({output, str(path.with_suffix(".png"))})


def _plots(reports: Mapping[str, Mapping[str, Any]]) -> bytes:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    drawn = [*_bars(reports), *_lines(reports)] or [{"title": "nothing to draw", "draw": lambda _: None, "height": 1.0}]
    heights = [plot["height"] for plot in drawn]
    figure, axes = pyplot.subplots(
        len(drawn), 1, figsize=(11, sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axis, plot in zip(axes[:, 0], drawn, strict=True):
        plot["draw"](axis)
        axis.set_title(plot["title"], loc="left", fontsize=10)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    found = io.BytesIO()
    figure.savefig(found, format="png", dpi=110)
    pyplot.close(figure)
    return found.getvalue()


def _bars(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """GB/s of every row of every case, the ceiling among them; a case that is a point of a line has no bars."""
    rows = [(f"{name} " if name else "", row) for name, report in reports.items() for row in report["results"]["rows"]
            if "gb_per_s" in row and "growth" not in row]  # fmt: skip
    for case in dict.fromkeys(row["case"] for _, row in rows):
        held = [(f"{name}{row['row']}", row) for name, row in rows if row["case"] == case]

        def draw(axis: Any, held: Sequence[tuple[str, Any]] = tuple(held)) -> None:
            colors = {"ceiling": "#9aa0a6", "pdxfer": "#1a73e8", "engine": "#e8710a"}
            labels, values = [label for label, _ in held], [row["gb_per_s"] for _, row in held]
            bars = axis.barh(labels, values, color=[colors.get(row["kind"], "#1a73e8") for _, row in held])
            axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
            axis.invert_yaxis()

        yield {"title": f"{case}: GB/s (median)", "draw": draw, "height": 0.9 + 0.32 * len(held)}


def _lines(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Growth: wherever a line has three points or more."""
    for x, y, what in _LINES:
        lines: dict[str, dict[float, float]] = {}
        for name, report in reports.items():
            for row in report["results"]["rows"]:
                if x in row and y in row and row.get("growth", "block_size") == x:
                    label = " ".join([name, *(str(row[w]) for w in what if w in row)]).strip()
                    lines.setdefault(label, {})[row[x]] = row[y]
        long = {label: points for label, points in lines.items() if len(points) > 2}
        if not long:
            continue

        def draw(axis: Any, long: Mapping[str, Mapping[float, float]] = long, x: str = x, y: str = y) -> None:
            for label, points in long.items():
                axis.plot(sorted(points), [points[p] for p in sorted(points)], marker="o", label=label)
            axis.set_xscale("log", base=2)
            if y.endswith("_ms"):
                axis.set_yscale("log")
            else:
                axis.set_ylim(bottom=0)
            axis.set_xlabel(x)
            axis.set_ylabel(y)
            axis.legend(fontsize=7)

        yield {"title": f"{y} over {x}", "draw": draw, "height": 4.2}


# -- the page ------------------------------------------------------------------------------------


def _page(reports: Mapping[str, Mapping[str, Any]], picture: bytes) -> str:
    image = base64.b64encode(picture).decode()
    body = "".join(_section(name, report) for name, report in reports.items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>pdxfer bench</title><style>{_STYLE}</style>'
        f'<h1>pdxfer bench</h1><img alt="plots" src="data:image/png;base64,{image}">{body}</html>\n'
    )


def _section(name: str, report: Mapping[str, Any]) -> str:
    results, facts = report["results"], report["machine"]
    head = f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_average'][0]:.1f}"
    parts = [f"<h2>{html.escape(name)} {html.escape(results['what'])}</h2><p>{html.escape(head)}</p>"]
    if lines := results.get("lines"):
        rows = "".join(
            f"<tr><td>{html.escape(line['line'])}<td>{html.escape(line['value'])}<td>{html.escape(line['target'])}"
            f"<td class={_MARKS[line['holds']]}>{_MARKS[line['holds']]}"
            for line in lines
        )
        parts.append(f"<table><tr><th>what<th>measured<th>target<th>{rows}</table>")
    columns = [c for c in dict.fromkeys(c for row in results["rows"] for c in row) if c not in _HIDDEN]
    rows = "".join("<tr>" + "".join(f"<td>{_cell(row.get(c))}" for c in columns) for row in results["rows"])
    parts.append(f"<h3>All rows</h3><table><tr>{''.join(f'<th>{html.escape(c)}' for c in columns)}{rows}</table>")
    parts += [f"<p>{html.escape(note)}</p>" for note in results.get("notes", ())]
    return "".join(parts)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else html.escape(f"{value:,}" if type(value) is int else str(value))
