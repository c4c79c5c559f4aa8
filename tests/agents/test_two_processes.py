"""Two DDP processes on the CPU give the weights of one, through the command."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from lightning_agentrl.models.demo import demo_model_folder
from tests.agents.processes import POPART, assert_alike, assert_same, fit, metrics, optimizer_states, read
from tests.tiny import small_model, tiny_tokenizer


@pytest.mark.slow
def test_two_processes_give_the_weights_of_one(tmp_path, exact_folder):
    """Five iterations, the first two of them warm-up; what is logged is equal too."""
    one = fit(tmp_path / "one", exact_folder, "SharedCritic", 1)
    two = fit(tmp_path / "two", exact_folder, "SharedCritic", 2)
    assert_same(read(one), read(two))
    logged = [metrics(tmp_path / name) for name in ("one", "two")]
    assert len(logged[0]) == len(logged[1]) > 4
    for a, b in zip(*logged, strict=True):
        assert a == pytest.approx(b, rel=1e-6, abs=1e-8, nan_ok=True)
    assert any(row.get("val/episodes") == 6 for row in logged[1])


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            ("--data.init_args.num_envs", "3", "--data.init_args.mini_batch_turns", "4"),
            "3 environments cannot be shared",
        ),
        pytest.param(
            ("--data.init_args.prompt.max_prompt_tokens", "2045"),
            "do not fit the model's context of 2048 tokens",
            marks=pytest.mark.long,
        ),
    ],
    ids=["sizes", "context"],
)
def test_what_two_processes_refuse_is_told_once_before_weights_are_read(tmp_path, exact_folder, arguments, part):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):  # no weights at all
        if (exact_folder / name).exists():
            (tmp_path / name).write_text((exact_folder / name).read_text())
    with pytest.raises(AssertionError) as error:
        fit(tmp_path / "run", tmp_path, "SharedCritic", 2, *arguments, typed=True)
    sentences = [line for line in str(error.value).splitlines() if "agentrl: " in line]
    assert len(sentences) == 1
    assert part in sentences[0]


@pytest.mark.long
def test_two_processes_stop_inside_the_warm_up_and_go_on_like_one(tmp_path, exact_folder):
    """The warm-up's data of both processes are in the checkpoint. With a critic of its own backbone."""
    one = fit(tmp_path / "one", exact_folder, "SeparateCritic", 1)
    stopped = fit(tmp_path / "stopped", exact_folder, "SeparateCritic", 2, "--trainer.max_epochs", "1")
    resumed = fit(tmp_path / "stopped", exact_folder, "SeparateCritic", 2, "--ckpt_path", str(stopped))
    assert_same(read(one), read(resumed))


@pytest.mark.slow
def test_a_critic_by_least_squares_sees_what_both_processes_see_and_is_saved(tmp_path, exact_folder):
    """Stopped inside the warm-up, in which nothing has a gradient."""
    one = read(fit(tmp_path / "one", exact_folder, "LeastSquaresCritic", 1))
    stopped = fit(tmp_path / "two", exact_folder, "LeastSquaresCritic", 2, "--trainer.max_epochs", "1")
    resumed = read(fit(tmp_path / "two", exact_folder, "LeastSquaresCritic", 2, "--ckpt_path", str(stopped)))
    assert one["state_dict"]["critic.regression.weights"].any()
    assert_same(one, resumed)


@pytest.mark.slow
def test_two_processes_collect_ahead_like_one_and_go_on_with_it(tmp_path, exact_folder):
    """Stopped with a rollout of both processes that was collected ahead; one process goes on with it, and with the
    units of its values.
    """
    ahead = ("--data.init_args.max_staleness", "1", *POPART)
    one = read(fit(tmp_path / "one", exact_folder, "SharedCritic", 1, *ahead))
    stopped = fit(tmp_path / "two", exact_folder, "SharedCritic", 2, *ahead, "--trainer.max_epochs", "4")
    samples = read(stopped)["RolloutDataModule"]["ahead"]["samples"]
    assert {turn["env"] for sample in samples for turn in sample["turns"]} == {0, 1, 2, 3}
    resumed = read(fit(tmp_path / "two", exact_folder, "SharedCritic", 1, *ahead, "--ckpt_path", str(stopped)))
    assert_same(one, resumed)
    assert_alike(one["RolloutDataModule"]["ahead"]["samples"], resumed["RolloutDataModule"]["ahead"]["samples"])


@pytest.mark.long
def test_two_processes_train_the_adapters_of_one(tmp_path, exact_folder):
    """Actor and critic on one frozen base."""
    lora = ("--model.init_args.lora", "{class_path: LoRA, init_args: {rank: 4}}")
    one = read(fit(tmp_path / "one", exact_folder, "SeparateCritic", 1, *lora))
    two = read(fit(tmp_path / "two", exact_folder, "SeparateCritic", 2, *lora))
    assert all(".lora_" in name or ".head." in name for name in one["state_dict"])
    assert any(".lora_B.actor" in name and weight.any() for name, weight in one["state_dict"].items())
    assert_same(one, two)


GROUPS = (
    *("--data.init_args.groups", "{size: 2, per_rollout: 4, mini_batches: 2, ahead: 4, ahead_turns: 1}"),
    *("--data.init_args.turns_per_env", "8", "--data.init_args.mini_batch_turns", "128"),  # their defaults
)


@pytest.mark.long
@pytest.mark.parametrize("advantage", ["GRPO", "ReMax", "DualDiscountGAE"])
def test_two_processes_share_groups_and_give_the_weights_of_one(tmp_path, exact_folder, advantage):
    """With episodes that are paused, and a warm-up of the critic."""
    chosen = (*GROUPS, "--model.init_args.advantage", advantage)
    one = read(fit(tmp_path / "one", exact_folder, "SharedCritic", 1, *chosen))
    two = read(fit(tmp_path / "two", exact_folder, "SharedCritic", 2, *chosen))
    assert_same(one, two)
    assert any(member["session"] for of_group in two["RolloutDataModule"]["sessions"].values() for member in of_group)
    logged = [metrics(tmp_path / name) for name in ("one", "two")]
    for a, b in zip(*logged, strict=True):
        assert a == pytest.approx(b, rel=1e-6, abs=1e-8, nan_ok=True)


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_groups_of_two_processes_go_on_with_one_or_two(tmp_path, exact_folder, devices):
    """Stopped right after the warm-up, with paused episodes in the checkpoint."""
    chosen = (*GROUPS, "--model.init_args.advantage", "GRPO")
    one = read(fit(tmp_path / "one", exact_folder, "SharedCritic", 1, *chosen))
    stopped = fit(tmp_path / "two", exact_folder, "SharedCritic", 2, *chosen, "--trainer.max_epochs", "3")
    resumed = fit(tmp_path / "two", exact_folder, "SharedCritic", devices, *chosen, "--ckpt_path", str(stopped))
    assert_same(one, read(resumed))


# Advantages that are rewards. Whitened ones have both signs, most of the gradient cancels, and of what is left
# rounding is a larger share: 2.5e-5 with the 30 layers of the demo model.
ONE_SIGN = (
    "--model.init_args.advantage={class_path: DualDiscountGAE, init_args: {whiten: false}}",
    "--data.init_args.interaction.init_args.invalid_penalty=0",
)


def small_folder(path: Path, family: Literal["demo", "qwen2", "qwen3"]) -> Path:
    if family == "demo":
        return demo_model_folder()
    tokenizer = tiny_tokenizer()
    small_model(family, len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.long
@pytest.mark.parametrize("family", ["demo", "qwen2", "qwen3"])
def test_two_processes_that_share_prefixes_have_the_gradient_of_turns_by_themselves(tmp_path, family):
    """In float32, with gradient checkpointing, of the first step of all: Adam's first moment is a tenth of it."""
    folder = small_folder(tmp_path / "model", family)

    def gradient(name, processes, tokens, *arguments):
        saving = f"{{dirpath: {tmp_path / name}, filename: last, save_on_train_epoch_end: true}}"
        first_step = ("--trainer.max_epochs", "1", "--data.init_args.mini_batch_turns", "16")
        budget = "--model.init_args.compute.max_tokens_per_micro_batch"
        settings = ("--model.init_args.kl.reward", "0", budget, str(tokens))
        callbacks = ("--trainer.callbacks", f"[{{class_path: ModelCheckpoint, init_args: {saving}}}]")
        arguments = (*first_step, *settings, *callbacks, *(ONE_SIGN if family == "demo" else ()), *arguments)
        saved = read(fit(tmp_path / name, folder, "SharedCritic", processes, *arguments, plugins="null"))
        (logged,) = [row for row in metrics(tmp_path / name, times=True) if "time/update_shared" in row]
        moments = torch.cat([state["exp_avg"].flatten() for state in optimizer_states(saved)])
        return saved["RolloutDataModule"]["sessions"], moments, logged["time/update_shared"]

    played, apart, shared = gradient("apart", 1, 1)  # one row in each micro-batch
    assert shared == 0
    also_played, together, shared = gradient(
        "together", 2, 4096, "--model.init_args.compute.gradient_checkpointing", "true"
    )
    assert shared > 0.3
    assert_alike(played, also_played)
    assert apart.norm() > 0
    error = float((together - apart).norm() / apart.norm())
    print(f"\n{family}: relative error {error:.1e}, {shared:.2f} of the tokens shared")
    assert error < 1e-5
