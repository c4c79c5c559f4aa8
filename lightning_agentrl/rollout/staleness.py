"""The bound on the age of a turn when it is trained on, in iterations."""

from __future__ import annotations

from lightning_agentrl.distributed import max_over_ranks
from lightning_agentrl.engines import Engine
from lightning_agentrl.metrics.rollout import staleness
from lightning_agentrl.rollout.sizes import GroupRollout, check_whole
from lightning_agentrl.types import Rollout


def check_staleness(max_staleness: int, groups: GroupRollout | None, engine: Engine) -> None:
    """Refuse a bound that cannot be kept, and engines that would sample from weights in the middle of an update.

    Raises:
        ValueError: one sentence with the key to change.
    """
    key = "data.init_args.max_staleness"
    check_whole(max_staleness, key, 0)
    if max_staleness == 0:
        return
    if not engine.own_weights:
        raise ValueError(
            f"{type(engine).__name__} does not say that it samples from weights of its own (Engine.own_weights), so it "
            f"cannot sample while the policy is trained; use VLLMEngine, VLLMServerEngine or TransformersEngine (key "
            f"data.init_args.engine), or {key} 0"
        )
    oldest = 1 if groups is None else 1 + groups.longest_ahead
    if max_staleness < oldest:
        raise ValueError(
            f"groups that are begun {oldest - 1} iteration{'s' * (oldest > 2)} ahead, in rollouts that are collected "
            f"1 iteration ahead, have turns of up to {oldest} iterations; raise {key} from {max_staleness} to {oldest} "
            "or lower data.init_args.groups.ahead"
        )


def too_old(
    rollout: Rollout, policy_version: int, steps_per_iteration: int, held_steps: range, max_staleness: int
) -> str:
    """Return why a rollout collected ahead must not be trained on, empty if it may. Every rank must call it."""
    own = staleness(rollout.turns, policy_version, steps_per_iteration, held_steps)
    oldest = max_over_ranks(max(own, default=0.0))
    if oldest <= max_staleness:
        return ""
    return f"has turns that are {oldest:g} iterations old, and data.init_args.max_staleness is {max_staleness}"


def misfit(rollout: Rollout, num_envs: int, turns: int | None, forks: bool = False) -> str:
    """Return why a rollout from a checkpoint does not fit this run, empty if it does.

    Args:
        rollout: of all ranks.
        num_envs: environments of a rollout of this run.
        turns: turns of a rollout of this run, where their number is fixed.
        forks: whether this run needs the states of its rollouts forked.
    """
    if forks and rollout.state_values is None:
        return "has no forks, which this run needs"
    envs = {turn.env for turn in rollout.turns}
    if turns is None and envs <= set(range(num_envs)):  # of a group an episode may be lost
        return ""
    if turns == len(rollout.turns) and envs == set(range(num_envs)):
        return ""
    return f"has {len(rollout.turns)} turns of {len(envs)} environments, other sizes than those of this run"
