"""One page of a run: its curves and its episodes, turn by turn and token by token."""

from lightning_agentrl.view.build import build_page

__all__ = ["build_page"]
