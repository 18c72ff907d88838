"""What the commands that print tables have in common. In come names and numbers, out go a console, a table, a size."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["binary", "console", "table"]


def console(width: int = 110) -> Console:
    """Standard output; ``width`` columns wide where it is no terminal."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=width)


def table(*columns: str, left: Collection[str] = ()) -> Table:
    """An empty table; the first column and those in ``left`` are text, the others numbers."""
    from rich import box
    from rich.table import Table

    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        found.add_column(column, justify="right" if index and column not in left else "left", overflow="fold")
    return found


def binary(nbytes: float) -> str:
    """Three digits and a binary unit for people; exact below 10 KiB."""
    if abs(nbytes) < 10240:
        return f"{nbytes:,.0f} B" if float(nbytes).is_integer() else f"{nbytes:,.1f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if abs(nbytes) < 1024:
            return f"{nbytes:,.1f} {unit}"
    return f"{nbytes / 1024:,.1f} TiB"
