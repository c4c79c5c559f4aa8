"""Run by tests/engines/test_vllm_images.py in a process of its own, in which torchvision can be imported."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext

import numpy as np
import torch

from lightning_agentrl.engines import PolicyHandle, Reply, SamplingRequest, VLLMEngine
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.packing import pack
from lightning_agentrl.types import ModelInput, Row
from tests.engines.test_vllm_engine import CLOSE, LONGEST, serve
from tests.inputs import random_ids
from tests.moving import move


def picture(seed: int, height: int = 48, width: int = 48) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def prompts(policy: LanguageModel) -> dict[str, ModelInput]:
    reader = policy.image_reader
    assert reader is not None
    start, end = ModelInput.of_ids(random_ids(0, 40)), ModelInput.of_ids(random_ids(1, 5))
    one, other, wide = (reader.read(picture(k, width=width)) for k, width in ((0, 48), (1, 48), (2, 80)))
    stray = ModelInput.of_ids((reader.placeholder, *random_ids(2, 3)))
    return {
        "text": start + end,
        "image": start + one + end,
        "equal ids, another image": start + other + end,
        "another size": start + wide + end,
        "two": start + one + end + wide + end,
        "two, the other way round": start + wide + end + one + end,
        "the same image twice": start + one + end + one + end,
        "a placeholder that is text": start + one + end + stray + end,
    }


@torch.no_grad()
def gap(policy: LanguageModel, prompt: ModelInput, reply: Reply) -> float:
    """Largest distance to the trainer's log-probs."""
    row = prompt + ModelInput.of_ids(reply.ids)
    places = tuple(range(len(prompt) - 1, len(row) - 1))
    packed = pack([Row(row, places)], reader=policy.image_reader)
    logps = policy.token_scores(policy.hidden(packed), packed.targets, 1.0).logps
    return float((logps - torch.tensor(reply.logps)).abs().max())


def main(folder: str) -> None:
    policy = LanguageModel(load_causal_lm(folder)).train()
    engine = VLLMEngine(kv_cache_gb=0.05)
    engine.start(PolicyHandle(policy, (CLOSE,), nullcontext, max_model_len=LONGEST))
    of_versions = []
    asked = prompts(policy)
    for version in range(3):
        engine.sync(version)
        with engine.collecting():
            replies = serve(engine, [SamplingRequest(one, 8, 1.0, k) for k, one in enumerate(asked.values())])
        of_versions.append(
            {
                name: {"gap": gap(policy, prompt, reply), "ids": list(reply.ids)}
                for (name, prompt), reply in zip(asked.items(), replies, strict=True)
            }
        )
        move(policy, seed=version, share=0.1)
    engine.stop()
    print(json.dumps(of_versions))


if __name__ == "__main__":
    main(sys.argv[1])
