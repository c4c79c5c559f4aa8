"""The runs that `same_as.py` compares, and the names that have changed since: tables to be read and added to."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = dict[str, Any]
Rule = tuple[str, str]  # regular expression of an old name, or of its beginning before . / or [, and the new one

# What has been renamed, oldest first. Old names are read as new ones on whichever side still has them.
METRICS: list[Rule] = []
TURNS: list[Rule] = []  # fields of the turn log; (r"metrics\.old", "metrics.new") for those inside of one
WEIGHTS: list[Rule] = []  # keys of the state dict

# What one side may lack: metrics and fields of the turn log that are new.
ADDED = re.compile(
    r"guard/.*|stop/(env_fault|reply_budget)|val/lost_episodes|lost|asked_again|call|model|.*\.initial_lr"
)

OPTIM = ("lr_actor", "lr_critic", "weight_decay", "max_grad_norm_actor", "max_grad_norm_critic")
COMPUTE = ("max_tokens_per_micro_batch", "gradient_checkpointing", "recompute_logits", "kernels")

# Old keys of a config and their new ones. A commit that no longer has the old key gets the new one.
KEYS: list[tuple[str, str]] = [
    *((f"model.init_args.{name}", f"model.init_args.optim.{name}") for name in OPTIM),
    *((f"model.init_args.{name}", f"model.init_args.compute.{name}") for name in COMPUTE),
    ("model.init_args.kl_in_reward", "model.init_args.kl.reward"),
    ("model.init_args.kl_kind", "model.init_args.kl.reward_kind"),
    ("model.init_args.kl_loss", "model.init_args.kl.loss"),
    ("model.init_args.kl_loss_kind", "model.init_args.kl.loss_kind"),
    ("model.init_args.loss_aggregation", "model.init_args.policy_loss.init_args.aggregation"),
    ("model.init_args.loss_norm_tokens", "model.init_args.policy_loss.init_args.norm_tokens"),
]


def one_list_of_sources(config: Config) -> None:
    """Write ``env``, ``other_envs`` and ``tasks`` as the list ``envs``."""
    data = config["data"]["init_args"]
    given = [data.pop("env", None), *(data.pop("other_envs", None) or []), data.pop("tasks", None)]
    data["envs"] = [source for source in given if source is not None]


# Changes of a config that no table of keys can tell: done where a commit has no such key, and the case sets it.
REWRITTEN: list[tuple[str, Callable[[Config], None]]] = [("data.init_args.other_envs", one_list_of_sources)]


@dataclass(frozen=True)
class Case:
    """A config, and the commands that are run with it in one folder, one after the other.

    Args:
        config: in the keys of the first commit.
        runs: a subcommand and its arguments each; ``--config`` is added.
        code: expected exit code of all commands but the last, which must succeed.
    """

    config: Config
    runs: tuple[tuple[str, ...], ...] = (("fit",),)
    code: int = 0


def of_class(name: str, **arguments: Any) -> Config:
    return {"class_path": name, "init_args": arguments}


def value_at(config: Any, key: str) -> Any:
    """What is at a dotted key; None where the way to it ends. Raises KeyError where the way has no such key."""
    for part in key.split("."):
        if not isinstance(config, dict):
            return None
        config = config[part]
    return config


def has(config: Config, key: str) -> bool:
    """Whether there is a value at a dotted key; also where the way to it ends in something that is no mapping."""
    try:
        value_at(config, key)
    except KeyError:
        return False
    return True


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy with the values at their dotted keys."""
    config = copy.deepcopy(config)
    for key, value in values.items():
        *way, last = key.split(".")
        node = config
        for part in way:
            node = node.setdefault(part, {})
        node[last] = value
    return config


def translated(
    config: Config, printed: Config, keys: list[tuple[str, str]], rewritten: list[tuple[str, Callable[[Config], None]]]
) -> tuple[Config, list[str]]:
    """A config in the keys of a commit, and the old keys that it does not have.

    Args:
        config: in the keys of the first commit.
        printed: what ``agentrl fit --print_config`` of the commit prints. A key whose parent it prints as null counts
            as known.
        keys: old and new keys.
        rewritten: old keys, and what is done where they are set and unknown.
    """
    config, applied = copy.deepcopy(config), []
    for old, new in keys:
        if has(config, old) and not has(printed, old):
            value = value_at(config, old)
            parent, _, name = old.rpartition(".")
            del value_at(config, parent)[name]
            config = changed(config, {new: value})
            applied.append(f"{old} -> {new}")
    for old, rewrite in rewritten:
        if has(config, old) and not has(printed, old):
            rewrite(config)
            applied.append(f"{old}: {rewrite.__name__}")
    return config, applied


def cases(model: Path, vision: Path, tasks: Path) -> dict[str, Case]:
    """Return all cases by name.

    Cases are added and never removed. Each takes a few seconds and must be equal in every run of one commit. The first
    ones also run with commits whose sampling depends on timing when one prompt continues another. So they have one
    environment per process, or prompts that never continue another.

    Args:
        model: folder of a text model.
        vision: folder of a vision-language model.
        tasks: file of one-turn tasks.
    """
    base = {
        "seed_everything": 0,
        "model": of_class(
            "PPOAgent",
            model=str(model),
            kl_in_reward=0.01,
            lr_actor=1e-3,
            lr_critic=1e-2,
            max_tokens_per_micro_batch=120,  # several micro-batches in each step
        ),
        "data": of_class(
            "RolloutDataModule",
            env={"id": "same_as_game:Echo-v0"},
            num_envs=1,
            memory=of_class("WindowMemory", turns=0),
            prompt={"think": False, "max_prompt_tokens": 512},
            interaction=of_class("TurnInteraction", max_reply_tokens=4),
            engine=of_class("TransformersEngine", max_batch=1),
            validation={"episodes": 4, "num_envs": 1},
        ),
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 3,
            "check_val_every_n_epoch": 100,
            "deterministic": "warn",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": of_class("CSVLogger", save_dir="metrics"),
            "callbacks": [
                of_class("TurnLog", folder="turns"),
                of_class(
                    "ModelCheckpoint",
                    dirpath=".",
                    filename="last",
                    enable_version_counter=False,
                    save_on_train_epoch_end=True,
                ),
            ],
        },
    }
    agent, data = "model.init_args", "data.init_args"
    separate, shared = ({f"{agent}.critic": of_class(name)} for name in ("SeparateCritic", "SharedCritic"))
    four = {f"{data}.num_envs": 4, f"{data}.turns_per_env": 4, f"{data}.mini_batch_turns": 8}
    one_at_a_time = {f"{data}.num_envs": 1, f"{data}.turns_per_env": 12, f"{data}.mini_batch_turns": 12}
    growing = one_at_a_time | {f"{data}.memory": of_class("FullMemory")}
    guessing = {"id": "agentrl_envs:GuessNumber-v0", "kwargs": {"highest": 5}}
    warm_up = of_class("CriticWarmup", rollouts=2, rounds=2, fraction=0.5)
    adaptive = of_class("AdaptiveKL", value=0.05, target=0.01, horizon=1000)

    interrupted = (
        ("fit", "--trainer.max_epochs", "2"),
        ("fit", "--trainer.max_epochs", "4", "--ckpt_path", "last.ckpt"),
    )

    def game(name: str, **settings: Any) -> Config:
        return {"id": f"same_as_game:{name}-v0", **settings}

    def case(
        values: Mapping[str, Any], *runs: tuple[str, ...], callbacks: tuple[Config, ...] = (), code: int = 0
    ) -> Case:
        sizes = {} if f"{data}.groups" in values else four
        config = changed(base, {**sizes, **values})
        config["trainer"]["callbacks"] += callbacks
        return Case(config, runs or (("fit",),), code)

    return {
        "separate": case({**separate, f"{agent}.kl_loss": 0.01, f"{data}.update_epochs": 2}),
        "shared": case({**shared, f"{agent}.kl_in_reward": adaptive, "trainer.check_val_every_n_epoch": 3}),
        "growing": case(
            {
                **shared,
                **growing,
                f"{agent}.max_tokens_per_micro_batch": 200,
                f"{agent}.advantage": of_class("DualDiscountGAE", gamma_step=0.95, lam_step=0.95),
                f"{data}.update_epochs": 2,
            }
        ),
        "thinking": case(
            {
                **separate,
                **one_at_a_time,
                f"{agent}.max_tokens_per_micro_batch": 500,
                f"{data}.env": guessing,
                f"{data}.mini_batch_turns": 6,
                f"{data}.memory": of_class("WindowMemory", turns=2),
                f"{data}.prompt.think": True,
                f"{data}.interaction": of_class("TurnInteraction", max_reply_tokens=12, invalid_penalty=0.2),
            }
        ),
        "groups": case(
            {
                f"{agent}.advantage": of_class("GRPO"),
                f"{agent}.group_filter": of_class("KeepWidest", share=0.5),
                f"{data}.groups": {"size": 3, "per_rollout": 4, "mini_batches": 2, "ahead": 2},
                f"{data}.memory": of_class("FullMemory"),
            }
        ),
        "sources": case(
            {
                **shared,
                f"{data}.num_envs": 6,
                f"{data}.mini_batch_turns": 12,
                f"{data}.other_envs": [guessing, {"id": "agentrl_envs:Bandit-v0", "share": 0.7}],
                f"{data}.tasks": {"path": str(tasks), "system": "Reply with a number.", "share": 0.6},
            }
        ),
        "settings": case(
            {
                **shared,
                f"{agent}.policy_loss": of_class("PPOClip", clip_low=0.1, clip_high=0.3),
                f"{agent}.loss_aggregation": "seq-mean-token-sum-norm",
                f"{agent}.loss_norm_tokens": 16,
                f"{agent}.correction": of_class("TruncatedWeights", cap=1.5),
                f"{agent}.kl_kind": "k3",
                f"{agent}.kl_loss": 0.02,
                f"{agent}.kl_loss_kind": "k2",
                f"{agent}.entropy_bonus": 0.01,
                f"{agent}.value_clip": 0.2,
                f"{agent}.first_token_weight": 2.0,
                f"{agent}.weight_decay": 0.1,
                f"{agent}.max_grad_norm_actor": 0.5,
                f"{agent}.max_grad_norm_critic": 0.3,
                f"{agent}.temperature": 0.9,
                f"{agent}.gradient_checkpointing": True,
                f"{agent}.recompute_logits": False,
                f"{agent}.variance_proxy": True,
                f"{data}.update_epochs": 2,
            }
        ),
        "lora": case({**separate, f"{agent}.lora": of_class("LoRA", rank=4), f"{agent}.lr_actor": 1e-2}),
        "bf16": case({**separate, "trainer.precision": "bf16-true"}),
        "warmup": case({**separate, "trainer.max_epochs": 4}, callbacks=(warm_up,)),
        "resume": case(shared, *interrupted),
        "ranks": case(
            {**separate, "trainer.devices": 2, "trainer.strategy": "ddp", "trainer.check_val_every_n_epoch": 3}
        ),
        # the next rollout is collected while this one trains, and a checkpoint holds it
        "ahead": case({**separate, f"{data}.max_staleness": 1}, *interrupted),
        # each process collects whole groups ahead
        "ranks_ahead": case(
            {
                f"{agent}.advantage": of_class("RLOO"),
                f"{data}.groups": {"size": 2, "per_rollout": 4, "mini_batches": 2, "ahead": 2},
                f"{data}.num_envs": 2,
                f"{data}.max_staleness": 2,
                "trainer.devices": 2,
                "trainer.strategy": "ddp",
            },
            *interrupted,
        ),
        # 72 requests at a time of an engine that by default samples 64, with prompts that share prefixes
        "crowd": case(
            {
                **shared,
                f"{agent}.max_tokens_per_micro_batch": 2000,
                f"{data}.num_envs": 72,
                f"{data}.turns_per_env": 3,
                f"{data}.mini_batch_turns": 108,
                f"{data}.memory": of_class("FullMemory"),
                f"{data}.engine": of_class("TransformersEngine"),
                "trainer.max_epochs": 2,
            }
        ),
        # one source in worker processes and one in threads
        "process": case(
            {
                **separate,
                f"{data}.env": game("Echo", worker="process", timeout_seconds=60.0),
                f"{data}.other_envs": [game("Failing", retries=1)],
                f"{data}.memory": of_class("WindowMemory", turns=1),
            },
            *interrupted,
        ),
        # errors of environments that a retry repairs, and others that lose the episode
        "faults": case(
            {
                **shared,
                **one_at_a_time,
                f"{data}.env": game("Failing", retries=1),
                f"{data}.faults": {"share": 1.0},
                f"{data}.turns_per_env": 24,
                "trainer.check_val_every_n_epoch": 3,
            }
        ),
        # lost episodes of groups are played once more
        "group_faults": case(
            {
                f"{agent}.advantage": of_class("GRPO"),
                f"{data}.env": game("Failing", retries=1),
                f"{data}.faults": {"share": 1.0},
                f"{data}.groups": {"size": 4, "per_rollout": 4, "mini_batches": 2},
            }
        ),
        # SIGTERM while the second rollout is collected; the run goes on with what it has saved
        "signal": case(
            {**separate, **growing, f"{data}.env": game("Ending", kwargs={"at_step": 20})},
            ("fit",),
            ("fit", "--ckpt_path", "stopped-1.ckpt"),
            code=143,
        ),
        # episodes that are longer than a rollout: replies that are asked for again, a budget of tokens, other words
        "session": case(
            {
                **shared,
                f"{data}.env": guessing | {"wording": {"system_prompt": "Guess. {actions}"}},
                f"{data}.memory": of_class("ClearingMemory", every=2),
                f"{data}.interaction": of_class(
                    "TurnInteraction", max_reply_tokens=4, max_turns=3, reply_budget=18, ask_again=1
                ),
                f"{data}.turns_per_env": 3,
                f"{data}.mini_batch_turns": 6,
                f"{data}.validation": {"episodes": 4, "num_envs": 2, "temperature": 0.0},
                "trainer.check_val_every_n_epoch": 2,
            },
            *interrupted,
        ),
        # the turns of each side of a game are an episode
        "sides": case(
            {
                f"{agent}.advantage": of_class("RLOO"),
                f"{data}.env": game("Duel"),
                f"{data}.interaction": of_class("SidesInteraction", max_reply_tokens=4),
                f"{data}.groups": {"size": 2, "per_rollout": 3, "mini_batches": 2, "ahead": 1},
                f"{data}.memory": of_class("FullMemory"),
            }
        ),
        # pictures in the history of a prompt, read by a tower that is trained
        "images": case(
            {
                **shared,
                f"{agent}.model": str(vision),
                f"{agent}.train_tower": True,
                f"{agent}.max_tokens_per_micro_batch": 300,
                f"{data}.env": game("Picture"),
                f"{data}.other_envs": [game("Picture", worker="process")],
                f"{data}.memory": of_class("WindowMemory", turns=1),
            }
        ),
        # images of growing samples in a checkpoint
        "growing_images": case(
            {
                **separate,
                **growing,
                f"{agent}.model": str(vision),
                f"{agent}.max_tokens_per_micro_batch": 500,
                f"{data}.env": game("Picture"),
                f"{data}.turns_per_env": 6,
                f"{data}.mini_batch_turns": 6,
                f"{data}.max_staleness": 1,
            },
            *interrupted,
        ),
        # rewards from a rule and from another model
        "judge": case(
            {
                **shared,
                f"{data}.env": game("Echo", judge=of_class("PatternJudge", pattern="[aeiou]", reward=0.3)),
                f"{data}.other_envs": [
                    game(
                        "Echo",
                        judge=of_class(
                            "ModelJudge",
                            model=str(model),
                            question="Rate it.",
                            max_reply_tokens=32,
                        ),
                    )
                ],
            }
        ),
        # advantages from episodes that are played on from states of the rollout
        "forks": case(
            {
                f"{agent}.advantage": of_class("Forked", branches=3, every=2),
                f"{agent}.kl_in_reward": 0.0,
                f"{agent}.kl_loss": 0.01,
                f"{data}.memory": of_class("FullMemory"),
                f"{data}.num_envs": 2,
                f"{data}.mini_batch_turns": 4,
            }
        ),
        "group_forks": case(
            {
                f"{agent}.advantage": of_class("Forked", branches=2),
                f"{agent}.kl_in_reward": 0.0,
                f"{data}.groups": {"size": 2, "per_rollout": 3, "mini_batches": 2},
            }
        ),
        # a policy is cloned from the turn log of a run, and another one from the scripted player
        "clone": case(
            {**separate, "trainer.max_epochs": 2},
            ("fit",),
            ("clone", "--recorded", ".", "--out", "recorded", "--steps", "4", "--lr", "1e-2"),
            ("clone", "--episodes", "6", "--out", "scripted", "--steps", "4", "--lr", "1e-2"),
        ),
        # metrics and checkpoints of cloning
        "clone_agent": case(
            {
                "model": of_class(
                    "CloneAgent",
                    model=str(model),
                    demonstrations=of_class("Expert", episodes=6),
                    min_return=0.5,
                    optim={"lr_actor": 1e-2},
                ),
                "trainer.check_val_every_n_epoch": 2,
            },
            *interrupted,
        ),
        "popart": case({f"{agent}.critic": of_class("SeparateCritic", popart=0.5), f"{data}.update_epochs": 2}),
        # rates rise and fall over the run, those of the actor from the end of the critic's warm-up
        "schedule": case(
            {
                f"{agent}.critic": of_class("SharedCritic", popart=0.3),
                f"{agent}.optim.schedule": {
                    "actor": {"shape": "cosine", "warmup_steps": 3, "final": 0.1},
                    "critic": {"shape": "linear", "warmup_steps": 2, "steps": 9},
                },
            },
            ("fit", "--trainer.max_epochs", "3"),
            ("fit", "--trainer.max_epochs", "5", "--ckpt_path", "last.ckpt"),
            callbacks=(warm_up,),
        ),
    }
