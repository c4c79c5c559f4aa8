"""Every shipped config is understood, and runs for two iterations after its warm-up with a tiny model."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any

import gymnasium
import lightning as L
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import ModelParallelStrategy
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint.filesystem import FileSystemReader

from agentrl_envs import ENV_IDS
from lightning_agentrl.advantages import AdvantageEstimator, DualDiscountGAE
from lightning_agentrl.agents import KL
from lightning_agentrl.agents.checks import check_trainer, warn_of_kl_in_groups
from lightning_agentrl.commands import main as commands
from lightning_agentrl.engines import VLLMEngine
from lightning_agentrl.episodes.contract import ContractReader
from lightning_agentrl.models import demo, loading
from lightning_agentrl.prompts import ChatRenderer, PromptFormat
from lightning_agentrl.prompts.messages import Observation, Rules
from lightning_agentrl.prompts.renderer import shown
from tests.engines.servers import ServerProcess
from tests.tiny import VisionFamily, tiny_tokenizer, tiny_vision_folder

FOLDER = Path(__file__).parents[1] / "configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
ALIKE = (  # to others, when they are made small
    *("babyai_goto_qwen2.5-3b", "babyai_goto_qwen2.5-3b_4gpus", "babyai_goto_qwen2.5-7b_2nodes"),
    "babyai_goto_qwen2.5-32b_lora_8gpus",
    "geo3k_qwen3-vl-2b",
)
# Models of these families are made small as such.
SEE: dict[str, VisionFamily] = {"Qwen/Qwen2.5-VL": "qwen2_5_vl", "Qwen/Qwen3-VL": "qwen3_vl"}


def family_of(path: Path) -> VisionFamily | None:
    model = yaml.safe_load(path.read_text())["model"]["init_args"]["model"]
    return next((family for name, family in SEE.items() if model.startswith(name)), None)


# These sample with vLLM as they say; the others that do sample with transformers here, so that they run without it.
WITH_VLLM = ("quickstart_vllm", "quickstart_vllm_server", "babyai_goto_qwen2.5-7b_8gpus")
MARKS = {path: pytest.mark.vllm for path in CONFIGS if path.stem in WITH_VLLM}
MARKS |= {path: pytest.mark.long for path in CONFIGS if path.stem in ALIKE}
TO_RUN = [pytest.param(path, marks=MARKS.get(path, ())) for path in CONFIGS]
QUICK = ("quickstart", "guess_number_grpo")
TO_READ = [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.slow) for path in CONFIGS]


@pytest.fixture
def server(request: pytest.FixtureRequest) -> ServerProcess | None:
    """Of the tiny model, for configs that need one."""
    return request.getfixturevalue("one_server") if "server" in request.getfixturevalue("path").stem else None


def agentrl(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(commands, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(sys, "argv", ["agentrl", *arguments])
    commands.main()


def made_small(config: dict[str, Any], model: Path) -> dict[str, Any]:
    """The same parts with a tiny model, few turns and two iterations after a warm-up of one."""
    config["model"]["init_args"] |= {"model": str(model), "compute": {"max_tokens_per_micro_batch": 4096}}
    data = config["data"]["init_args"]
    if "groups" in data:
        data |= {"num_envs": 4, "groups": {**data["groups"], "size": 2, "per_rollout": 2, "mini_batches": 2}}
    else:
        data |= {"num_envs": 4, "turns_per_env": 2, "mini_batch_turns": 4}
    data["prompt"]["max_prompt_tokens"] = 1900  # a tiny tokenizer needs many tokens
    data["interaction"]["init_args"]["max_reply_tokens"] = 8
    data["validation"] |= {"episodes": 2, "num_envs": 2, "every": 2}
    for env in environments(config):
        env["kwargs"] = env.get("kwargs", {}) | _short_episodes(env["id"])
        if "Crafter" in env["id"]:
            # What it says is too long for a tiny tokenizer.
            env["wording"] = {"system_prompt": "Survive."}
            if "system" in data["prompt"]:
                data["prompt"]["system"] = "Survive.\n{achievements}"
    trainer = config["trainer"]
    trainer |= {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "max_epochs": 3}
    if "strategy" in trainer:  # the same strategy, with one process on the CPU
        trainer["strategy"]["init_args"]["data_parallel_size"] = 1
    engine = data.get("engine", {}).get("init_args", {})
    if "gpu_memory_utilization" in engine:
        engine |= {"kv_cache_gb": 0.1}
    for callback in trainer["callbacks"]:
        if callback["class_path"] == "CriticWarmup":
            callback["init_args"] = {"rollouts": 1, "rounds": 1, "fraction": 1.0}
        if callback["class_path"] == "RunCheckpoints":
            callback["init_args"]["every_n_epochs"] = 3
    return config


def with_tools(model: Path, folder: Path) -> Path:
    """Return a copy of a tiny model with the chat template of the demo model with tools."""
    copytree(model, folder)
    copyfile(Path(demo.__file__).with_name("demo_tools.jinja"), folder / demo.TEMPLATE)
    return folder


def drawn_tasks(folder: Path) -> Path:
    """A data set of two questions about pictures."""
    folder.mkdir()
    rows = []
    for number in range(2):
        Image.new("RGB", (60, 40), (200, 90 * number, 0)).save(folder / f"{number}.png")
        rows.append({"question": "How long is AB?", "answer": str(number), "image": f"{number}.png"})
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


def environments(config: dict[str, Any]) -> list[dict[str, Any]]:
    data = config["data"]["init_args"]
    return data.get("envs") or [data["env"]]


def _short_episodes(env_id: str) -> dict[str, Any]:
    small = {
        "CrafterText": {"area": 32},
        "ZoomSearch": {"view_px": 224},
    }  # where a picture is as large as a model takes it
    return {} if "Bandit" in env_id else {"max_turns": 4} | small.get(env_id.split(":")[1].split("-")[0], {})


def test_there_are_configs() -> None:
    named = {"quickstart", "bandit", "guess_number", "guess_number_grpo", "babyai_goto_qwen2.5-3b"}
    assert {path.stem for path in CONFIGS} >= named
    given = [yaml.safe_load(path.read_text()) for path in CONFIGS]
    sizes = {processes(config["trainer"]) for config in given}
    assert sizes == {1, 4, 8, 16}
    assert {config["model"]["init_args"]["model"] for config in given} == {
        *("demo", "demo-tools"),
        *(f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "3B", "7B", "14B", "32B")),
        *("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-2B-Instruct"),
    }


PUBLISHED: dict[str, dict[str, Any]] = {  # of BabyAI
    "model": {
        "kl": {"reward": 0.001, "reward_kind": "k1"},
        "entropy_bonus": 0.001,
        "value_clip": 0.5,
        "first_token_weight": 3.0,
        "optim": {
            "lr_actor": 1e-6,
            "lr_critic": 1e-5,
            "weight_decay": 0.01,
            "max_grad_norm_actor": 1.0,
            "max_grad_norm_critic": 1.0,
        },
        "temperature": 1.0,
        "critic": {"class_path": "SeparateCritic"},
        "advantage": {
            "class_path": "DualDiscountGAE",
            "init_args": {"gamma_step": 0.99, "lam_step": 0.95, "gamma_token": 1.0, "lam_token": 1.0},
        },
        "policy_loss": {
            "class_path": "PPOClip",
            "init_args": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        },
    },
    "data": {
        "num_envs": 32,
        "turns_per_env": 8,
        "mini_batch_turns": 128,
        "update_epochs": 1,
        "memory": {"class_path": "WindowMemory", "init_args": {"turns": 1}},
    },
    "prompt": {"think": True, "examples": False, "max_prompt_tokens": 1024},
    "interaction": {"max_reply_tokens": 512, "invalid_penalty": 0.1, "invalid_mode": "replace"},
}
OF_DOMAIN: dict[str, dict[str, Any]] = {  # what differs: sizes of rollouts and prompts, warm-up, goal, validation
    "babyai_goto": {"warmup": (40, 5), "critic_steps": 100, "every": 30},
    "babaisai": {"warmup": (40, 10), "critic_steps": 200, "every": 30, "max_reply_tokens": 384},
    "crafter": {
        "warmup": (20, 20),
        "critic_steps": 400,
        "every": 0,
        "num_envs": 128,
        "turns_per_env": 16,
        "mini_batch_turns": 1024,
        "max_prompt_tokens": 4096,
    },
}
OF_ADAPTERS = {"optim": PUBLISHED["model"]["optim"] | {"lr_actor": 1e-5, "lr_critic": 1e-4}}  # ten times as much


OF_THE_RECIPE = [(path, name) for name in OF_DOMAIN for path in sorted(FOLDER.glob(f"{name}_*.yaml"))]


@pytest.mark.parametrize(("path", "domain"), OF_THE_RECIPE, ids=lambda given: getattr(given, "stem", given))
def test_a_config_has_the_published_settings(path: Path, domain: str) -> None:
    config, own = yaml.safe_load(path.read_text()), OF_DOMAIN[domain]
    model, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    expected = PUBLISHED["model"] | (OF_ADAPTERS if "lora" in model else {})
    assert {key: model.get(key) for key in expected} == expected

    def published(name: str) -> dict[str, Any]:
        return {key: own.get(key, value) for key, value in PUBLISHED[name].items()}

    assert {key: data.get(key) for key in PUBLISHED["data"]} == published("data")
    assert data["interaction"]["init_args"] == published("interaction")
    assert {key: data["prompt"].get(key) for key in PUBLISHED["prompt"]} == published("prompt")
    (warmup,) = (c["init_args"] for c in trainer["callbacks"] if c["class_path"] == "CriticWarmup")
    assert (warmup["rollouts"], warmup["rounds"]) == own["warmup"]
    warm = warmup["rounds"] * warmup["rollouts"] * warmup["fraction"]
    steps = warm * data["num_envs"] * data["turns_per_env"] / data["mini_batch_turns"]
    assert steps == own["critic_steps"]
    assert trainer["max_epochs"] == 300 + warm
    assert data["validation"]["every"] == own["every"]
    assert trainer["precision"] == "bf16-mixed"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("babyai_goto_*.yaml")), ids=lambda path: path.stem)
def test_the_published_words_of_babyai_have_places_for_the_environments(path: Path) -> None:
    prompt = yaml.safe_load(path.read_text())["data"]["init_args"]["prompt"]
    assert PromptFormat(**prompt).places == ["mission", "actions", "tips"]


@pytest.mark.parametrize("goal", ["GoTo", "PickUp", "Open", "PutNext", "PickUpSeqGoTo"])
def test_the_config_of_babyai_serves_all_five_published_goals(goal: str) -> None:
    assert f"BabyAIText-{goal}-v0" in ENV_IDS
    assert goal in (FOLDER.parent / "docs" / "many_devices.md").read_text()


def test_the_system_text_of_crafter_lists_what_is_still_open() -> None:
    data = yaml.safe_load((FOLDER / "crafter_qwen2.5-7b_8gpus.yaml").read_text())["data"]["init_args"]
    prompt = PromptFormat(**data["prompt"])
    env = gymnasium.make(data["env"]["id"], area=32)
    env.reset(seed=0)
    reader, player, texts = ContractReader(prompt.places), env.unwrapped.solver(), []
    chat = ChatRenderer(tiny_tokenizer(), prompt)
    for _ in range(30):
        contract = reader.read(env)
        rules = Rules(contract.system_prompt, contract.examples, contract.actions, places=contract.places)
        texts.append(chat.writer.system(rules)[0]["content"])
        env.step(player())
    assert "- Collect Wood\n" in texts[0]
    assert "- Collect Wood\n" not in texts[-1]
    assert "- Make Iron Sword\n" in texts[-1]
    assert not re.search(r"[{}]", texts[-1])


def test_the_published_prompt_is_filled_by_the_environment() -> None:
    data = yaml.safe_load((FOLDER / "babyai_goto_qwen2.5-3b.yaml").read_text())["data"]["init_args"]
    env = gymnasium.make(data["env"]["id"])
    observation, _ = env.reset(seed=0)
    contract = ContractReader().read(env)
    tokenizer = tiny_tokenizer()
    chat = ChatRenderer(tokenizer, PromptFormat(**data["prompt"] | {"max_prompt_tokens": 2000}))
    rules = Rules(contract.system_prompt, contract.examples, contract.actions, places=contract.places)
    text = shown(tokenizer, chat.render(rules, Observation(observation)).segments[0].input)
    assert contract.mission.startswith("go to")
    assert f"Your goal is to {contract.mission}. The following" in text
    listed = "\n".join(f"- {name}: {description}" for name, description in contract.actions.items())
    assert f"\n\n{listed}\n\n" in text
    assert f"Tips:\n{contract.tips}\n\nPLAY!<|im_end|>" in text
    assert contract.system_prompt not in text
    assert not re.search(r"[{}]", text)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_config_is_warned_of_a_kl_in_rewards_that_are_divided(path: Path) -> None:
    model = yaml.safe_load(path.read_text())["model"]["init_args"]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--advantage", type=AdvantageEstimator | None)
    parser.add_argument("--kl", type=KL | None)
    given = {name: model[name] for name in ("advantage", "kl") if name in model}
    made = parser.instantiate_classes(parser.parse_object(given))
    advantage, kl = made.advantage or DualDiscountGAE(), made.kl or KL()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_kl_in_groups(advantage, kl.reward != 0, model.get("group_filter"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_for_gpus_samples_with_vllm(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    if config["trainer"]["accelerator"] == "gpu":
        assert config["data"]["init_args"]["engine"]["class_path"] == "VLLMEngine"


def processes(trainer: dict[str, Any]) -> int:
    return trainer.get("devices", 1) * trainer.get("num_nodes", 1)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_fits_its_processes(path: Path, tmp_path: Path) -> None:
    """Its strategy is built for all of them, as it is, and passes the checks of a start; without a GPU, on CPUs."""
    config = yaml.safe_load(path.read_text())
    keys = config["trainer"]
    settings = {key: keys[key] for key in ("devices", "num_nodes", "precision") if key in keys}
    if "strategy" in keys:
        assert keys["strategy"]["class_path"] == "lightning.pytorch.strategies.ModelParallelStrategy"
        settings["strategy"] = ModelParallelStrategy(**keys["strategy"]["init_args"])
    trainer = L.Trainer(accelerator="cpu", max_epochs=keys["max_epochs"], logger=False, **settings)
    data = config["data"]["init_args"]
    groups = data.get("groups")
    steps = groups["mini_batches"] if groups else data["num_envs"] * data["turns_per_env"] // data["mini_batch_turns"]
    check_trainer(trainer, steps, lora="lora" in config["model"]["init_args"])
    assert isinstance(trainer.strategy, ModelParallelStrategy) == (processes(keys) > 1)
    assert trainer.num_devices * trainer.num_nodes == processes(keys)
    shared = groups["per_rollout"] if groups else data["mini_batch_turns"]
    assert data["num_envs"] % processes(keys) == shared % processes(keys) == 0


@pytest.mark.parametrize("path", TO_READ, ids=lambda path: path.stem)
def test_a_config_is_understood(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        agentrl(monkeypatch, "fit", "--config", str(path), "--print_config")
    assert stop.value.code == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    given = yaml.safe_load(path.read_text())
    assert shown["trainer"]["max_epochs"] == given["trainer"]["max_epochs"]
    assert shown["data"]["init_args"]["num_envs"] == given["data"]["init_args"]["num_envs"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_planned_without_its_devices_its_engine_and_the_hub(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(VLLMEngine, "check", lambda engine: pytest.fail("vLLM is looked for"))
    monkeypatch.setattr(loading, "model_info", no_hub)
    agentrl(monkeypatch, "fit", "--config", str(path), "--dry-run")
    shown = capsys.readouterr().out
    given = yaml.safe_load(path.read_text())
    bundled = given["model"]["init_args"]["model"].startswith("demo")
    assert bool(re.search(r"\none prompt: \d+ tokens", shown)) is bundled
    assert ("no prompt is shown" in shown) is not bundled
    assert re.search(r"expected peak +[\d.]+ GiB", shown)
    if given["trainer"]["accelerator"] == "gpu":
        (size,) = re.findall(r"needs +GPUs of (\d+) GB", shown)
        said = re.findall(r"(?:GPUs? of|measured\):) (\d+) GB", " ".join(path.read_text().replace("#", " ").split()))
        assert int(size) <= int(said[0])  # the head of the config


def no_hub(*args: Any, **kwargs: Any) -> None:
    raise OSError("the hub cannot be reached")


def optimizers_in(checkpoint: Path) -> set[str]:
    """Names or numbers of the optimizers whose state is saved."""
    if checkpoint.is_dir():
        saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        return {name.split(".")[0] for name in saved if name.startswith("optimizer")}
    states = torch.load(checkpoint, weights_only=True)["optimizer_states"]
    assert all(group["name"] in ("actor", "critic") for state in states for group in state["param_groups"])
    return {str(number) for number, _ in enumerate(states)}


@pytest.mark.slow
@pytest.mark.parametrize("path", TO_RUN, ids=lambda path: path.stem)
@pytest.mark.usefixtures("no_processes_left")
def test_a_config_runs(
    path: Path,
    served_folder: Path,
    server: ServerProcess | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    family, model = family_of(path), served_folder
    if family is not None:
        model = tiny_vision_folder(tmp_path / "model", family)
    elif "model: demo-tools" in path.read_text():
        model = with_tools(model, tmp_path / "model")
    config = made_small(yaml.safe_load(path.read_text()), model)
    if path.stem not in WITH_VLLM:
        config["data"]["init_args"].pop("engine", None)
    for env in environments(config):
        if "source" in env["kwargs"]:
            env["kwargs"]["source"] = str(drawn_tasks(tmp_path / "tasks"))
    if server is not None:
        config["data"]["init_args"]["engine"]["init_args"]["urls"] = [server.url]
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)  # a config writes below runs/ of the folder it is started in
    agentrl(monkeypatch, "fit", "--config", "small.yaml")

    run = tmp_path / config["trainer"]["default_root_dir"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["before"]["episodes"] == summary["after"]["episodes"] == 2
    if "RunCheckpoints" in path.read_text():
        assert len(optimizers_in(tmp_path / summary["checkpoint"])) == 1
    (events,) = run.rglob("events.out.tfevents.*")
    logged = EventAccumulator(str(events)).Reload().Scalars("rollout/reward_per_turn")
    assert len(logged) == 3
    assert all(math.isfinite(point.value) for point in logged)
    assert "iteration 3/3 train" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "bandit", "guess_number", "guess_number_grpo"])
def test_the_demo_model_names_actions_before_it_has_learned_anything(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A policy whose replies name no action earns nothing that it could learn from."""
    few = ("--data.init_args.validation.episodes", "16", "--trainer.default_root_dir", str(tmp_path))
    agentrl(monkeypatch, "validate", "--config", str(FOLDER / f"{name}.yaml"), *few)
    (share,) = re.findall(r"val/valid_action_ratio\W+([\d.]+)", capsys.readouterr().out)
    assert float(share) > 0.4
