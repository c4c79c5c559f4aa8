"""PolicyFolder says at the start what would fail at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_agentrl.callbacks import PolicyFolder
from lightning_agentrl.errors import ConfigError
from tests.agents.harness import make_agent, make_data, make_trainer


@pytest.mark.parametrize("place", ["taken", "taken/policy"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_the_agent_plays(
    place: str, tmp_path: Path, tiny_folder: Path
) -> None:
    (tmp_path / "taken").write_text("a file")
    data = make_data()
    data.collect = lambda: pytest.fail("the agent plays")  # type: ignore[method-assign]
    trainer = make_trainer(tmp_path, 1, [PolicyFolder(str(tmp_path / place))])
    with pytest.raises(ConfigError, match=rf"PolicyFolder .*'.*{place}'.*trainer\.callbacks"):
        trainer.fit(make_agent(tiny_folder), data)
