"""Environments for the sweep of the checker, such as `env_sweep:Hangman-v0` with `benchmarks` on the import path."""

import gymnasium

from env_sweep import small

for _name, _turns in small.GAMES.items():
    gymnasium.register(f"{_name}-v0", f"env_sweep.small:{_name}", max_episode_steps=_turns)
gymnasium.register("AsItComes-v0", "env_sweep.as_it_comes:TextArenaAsItComes")
gymnasium.register("Unguarded-v0", "env_sweep.as_it_comes:Unguarded")
