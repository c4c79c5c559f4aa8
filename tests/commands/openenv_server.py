"""A server of OpenEnv's own package, whose environment counts. Run with an interpreter that has `openenv`."""

import sys
import time

import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    """One text."""

    message: str
    tone: str = "calm"


class Heard(Observation):
    """One text."""

    echo: str
    length: int = 0


class Counter(Environment):
    """Says what it heard and how often; ends after four."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count = 0
        return Heard(echo=f"seed {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        if action.message == "boom":
            raise RuntimeError("the game\nfell over")
        if action.message == "slow":
            time.sleep(3)
        self.count += 1
        reward = {"nan": float("nan"), "none": None}.get(action.message, 0.5)
        return Heard(echo=f"{self.count}: {action.message}", reward=reward, done=self.count == 4)

    @property
    def state(self):
        return State(step_count=self.count)


app = create_app(Counter, Say, Heard, max_concurrent_envs=2)
if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", ws_ping_interval=1.0, ws_ping_timeout=1.0)
