"""From the name of a model to where it is."""

from __future__ import annotations

from pathlib import Path

DEMO = "demo"  # the name of the bundled model in a config


def resolve_model(model: str) -> str:
    """Return a hub id or folder as given; ``demo`` becomes the folder of the bundled model."""
    if model == DEMO:
        from lightning_agentrl.models.demo import demo_model_folder  # comes with transformers, which takes seconds

        return str(demo_model_folder())
    return str(Path(model).expanduser()) if model.startswith("~") else model
