"""Reports: tables of numbers with warnings, as text for a terminal and as HTML for a page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A line of a table.

    Args:
        name: name of the number.
        value: value as text.
        share: share from 0 to 1, drawn as a bar; None draws no bar.
        warning: reason why the number deserves attention; empty without a warning.
        brief: whether the entry is also in the terminal's summary.
    """

    name: str
    value: str
    share: float | None = None
    warning: str = ""
    brief: bool = False


@dataclass(frozen=True)
class Table:
    """Entries with a title, followed by code to copy, such as a part of a config."""

    title: str
    rows: Sequence[Entry]
    about: str = ""
    code: str = ""


@dataclass(frozen=True)
class Report:
    """Tables with a title."""

    title: str
    tables: Sequence[Table]

    def text(self) -> str:
        """Return the brief entries, the warnings and the code as text for a terminal."""
        shown = {table.title: [row for row in table.rows if row.brief or row.warning] for table in self.tables}
        width = max((len(row.name) for rows in shown.values() for row in rows), default=0)
        lines = [self.title]
        for table in self.tables:
            rows = shown[table.title]
            lines += [f"  {table.title}"] if rows or table.code else []
            for row in rows:
                lines.append(f"    {row.name:<{width}}  {row.value}")
                lines += [f"      ! {row.warning}"] if row.warning else []
            if table.code:
                lines += [f"    {table.about}", *(f"      {line}" for line in table.code.splitlines())]
        return "\n".join(lines)

    def html(self) -> str:
        """Return all tables as HTML; texts are escaped."""
        tables = "".join(map(_table, self.tables))
        return f'<section class="report"><h2>{_safe(self.title)}</h2><div class="cards">{tables}</div></section>'


def _table(table: Table) -> str:
    about = f'<p class="quiet">{_safe(table.about)}</p>' if table.about else ""
    rows = "".join(map(_row, table.rows))
    code = f"<pre>{_safe(table.code)}</pre>" if table.code else ""
    return f'<div class="card"><h3>{_safe(table.title)}</h3><table>{rows}</table>{about}{code}</div>'


def _row(row: Entry) -> str:
    bar = "" if row.share is None else f'<i class="bar" style="width:{100 * min(max(row.share, 0.0), 1.0):.1f}%"></i>'
    warned = f'<tr><td colspan="2"><div class="note">{_safe(row.warning)}</div></td></tr>' if row.warning else ""
    return f"<tr><td>{_safe(row.name)}{bar}</td><td>{_safe(row.value)}</td></tr>{warned}"


def _safe(text: str) -> str:
    return html.escape(text)
