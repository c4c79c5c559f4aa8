"""A setting as a config that is given behind a user's own: `--config mine.yaml --config advice.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from lightning_agentrl.agents import KL
from lightning_agentrl.losses import FixedKL
from lightning_agentrl.metrics.advice import GROUP, LONG_CUT, SHORT_CUT, WARMUP_ROUNDS, Advice, Setting
from lightning_agentrl.rollout.sizes import MINI_BATCH_TURNS, TURNS_PER_ENV

BEGINS = b"# agentrl advise"  # the file
GAMMA, LAM = 0.99, 0.95
DUAL = {"class_path": "DualDiscountGAE", "init_args": {"gamma_step": GAMMA, "lam_step": LAM}}
DUAL["init_args"] |= {"gamma_token": 1.0, "lam_token": 1.0}  # type: ignore[operator]
ADVANTAGES: dict[Setting, dict[str, Any]] = {
    Setting.SHORT_CUTS: DUAL,
    Setting.LONG_CUTS: DUAL,
    Setting.ONE_PAIR: {"class_path": "GAE", "init_args": {"gamma": GAMMA, "lam": LAM}},
    Setting.GROUPS: {"class_path": "GRPO"},
    Setting.GROUPS_BY_STATE: {"class_path": "GiGPO", "init_args": {"gamma": GAMMA}},
    Setting.WARM_UP: DUAL,
}
CUTS = {
    Setting.SHORT_CUTS: SHORT_CUT,
    Setting.LONG_CUTS: LONG_CUT,
    Setting.ONE_PAIR: LONG_CUT,
    Setting.WARM_UP: SHORT_CUT,
}
WARMUP = {"class_path": "CriticWarmup", "init_args": {"rollouts": 2, "rounds": WARMUP_ROUNDS, "fraction": 0.5}}
NO_LEAST = {"min_explained_variance": None}


def setting_config(
    setting: Setting, config: Mapping[str, Any], mean_turns: float, grows: bool, processes: int = 1
) -> dict[str, Any]:
    """Return the keys that change a config to a setting, with about as many turns in an iteration.

    Args:
        setting: what is wanted.
        config: all keys of the run, as plain types.
        mean_turns: of an episode.
        grows: whether the memory keeps an episode in one sample.
        processes: of the run, which share environments and groups evenly.
    """
    model, data = config["model"], config["data"]
    own, critic = model["init_args"], {"class_path": "SeparateCritic"}
    found: dict[str, Any] = {"advantage": ADVANTAGES[setting]}
    if setting not in CUTS:
        found |= {"critic": None} | _kl_in_loss(own)
    else:
        found |= _without_groups(own)
        if setting is not Setting.WARM_UP:
            found |= {"critic": critic} | _critic_rate(own)
    sizes = _sizes(setting, data["init_args"], mean_turns, grows, processes)
    changes = {
        "model": {"class_path": model["class_path"], "init_args": found},
        "data": {"class_path": data["class_path"], "init_args": sizes},
    }
    return changes | _trainer(setting, config.get("trainer") or {})


def config_text(advice: Advice, changes: Mapping[str, Any]) -> str:
    """Return the file, with the reasons as comments."""
    head = [f"{BEGINS.decode()}: {advice.setting} ({advice.sure})"]
    head += [f"# {one.part}: {one.value} ({one.sure}): {one.why}" for one in advice.choices]
    head += [f"# note: {note}" for note in advice.notes]
    return "\n".join(head) + "\n\n" + yaml.safe_dump(dict(changes), sort_keys=False)


def iteration_turns(data: Mapping[str, Any], mean_turns: float) -> int:
    """Return the turns of an iteration of a config, those of groups by the mean length of their episodes."""
    groups = data.get("groups")
    if groups is None:
        return int(data["num_envs"] * data["turns_per_env"])
    return max(round(groups["size"] * groups["per_rollout"] * mean_turns), 1)


def _sizes(setting: Setting, data: Mapping[str, Any], mean_turns: float, grows: bool, processes: int) -> dict[str, Any]:
    turns, groups = iteration_turns(data, mean_turns), data.get("groups")
    steps = groups["mini_batches"] if groups else max(turns // data["mini_batch_turns"], 1)
    if setting not in CUTS:
        count = _shared(round(turns / (GROUP * mean_turns)), processes)
        sizes = {"size": GROUP, "per_rollout": count, "mini_batches": min(steps, GROUP * count), "ahead": 0}
        return {"turns_per_env": TURNS_PER_ENV, "mini_batch_turns": MINI_BATCH_TURNS, "groups": sizes}
    cut = CUTS[setting]
    envs = _shared(max(round(turns / cut), steps if grows else 1), processes)
    of_each = envs // processes * cut
    most = min(steps, of_each, *([envs] if grows else []))  # a growing sample is of one environment, and in one step
    steps = next(count for count in range(most, 0, -1) if of_each % count == 0)
    return {"num_envs": envs, "turns_per_env": cut, "mini_batch_turns": envs * cut // steps, "groups": None}


def _shared(count: int, processes: int) -> int:
    """Return the nearest number above 0 that so many processes share evenly."""
    return max(round(count / processes), 1) * processes


def _without_groups(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of what only groups can have."""
    found: dict[str, Any] = {"group_filter": None} if own.get("group_filter") else {}
    loss = own.get("policy_loss") or {}
    if (loss.get("init_args") or {}).get("aggregation") == "prompt-mean":
        found["policy_loss"] = {"class_path": loss["class_path"], "init_args": {"aggregation": "token-mean"}}
    return found


def _kl_in_loss(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes that take a KL from the rewards to the loss.

    Divided by the spread of a group, it would teach at full size where all episodes earn the same.
    """
    if "kl" not in own:  # an agent of somebody else's
        return {}
    kl = own["kl"] or {}
    reward = kl.get("reward", KL().reward)
    if isinstance(reward, Mapping):  # a coefficient by its class
        reward = (reward.get("init_args") or {}).get("value", FixedKL().value)
    return {"kl": {"reward": 0.0, "loss": kl.get("loss") or reward}} if reward else {}


def _critic_rate(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a learning rate for a whole critic in place of one for a head alone."""
    kind = (own.get("critic") or {}).get("class_path", "")
    optim = own.get("optim") or {}
    if not kind.endswith("SharedCritic") or "lr_critic" not in optim:
        return {}
    return {"optim": {"lr_critic": min(optim["lr_critic"], 10 * optim["lr_actor"])}}


def _trainer(setting: Setting, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the callbacks with the warm-up that the setting has, where the config has another one."""
    given = trainer.get("callbacks") or []
    callbacks = list(given) if isinstance(given, list) else [given]
    kept = [one for one in callbacks if not one["class_path"].endswith("CriticWarmup")]
    if setting is Setting.WARM_UP:
        warm = {**WARMUP, "init_args": {**WARMUP["init_args"], **NO_LEAST}}  # type: ignore[dict-item]
        longer = (
            {} if trainer.get("max_epochs") in (None, -1) else {"max_epochs": trainer["max_epochs"] + WARMUP_ROUNDS}
        )
        return {"trainer": {"callbacks": [warm, *kept], **longer}}
    return {"trainer": {"callbacks": kept}} if len(kept) < len(callbacks) else {}
