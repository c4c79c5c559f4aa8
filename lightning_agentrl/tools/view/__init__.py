"""Run viewer: a page of one or two runs with curves, and with episodes turn by turn and token by token."""

from lightning_agentrl.tools.view.build import build_comparison, build_page, build_report
from lightning_agentrl.tools.view.report import Entry, Report, Table

__all__ = ["Entry", "Report", "Table", "build_comparison", "build_page", "build_report"]
