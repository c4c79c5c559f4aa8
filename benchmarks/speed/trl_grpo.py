"""TRL's GRPO trainer as a contender, in its own environment: its training loop on given tokens and advantages.

Started by `compare.py`; its micro-batch is counted in rows. Sampling and rewards are left out, everything from the
collected batch to the optimizer step is TRL's and transformers' own. Variants:

* ``shipped``: the class as it is. Without Triton, which CPUs lack, it projects every position on the vocabulary.
* ``compact``: TRL's switch for Triton devices is set, so that it projects completion positions only.
* ``scored``: the backbone, then the head on the sampled positions only, with ordinary log-softmax.
"""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl.trainer.utils
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.speed.job import Channel, Job, own_job
from benchmarks.speed.layouts import Row

# By its path: this environment lacks the package.
ALLOCATOR = Path(__file__).resolve().parents[2] / "lightning_agentrl" / "models" / "allocator.py"


def batch_of(rows: list[Row]) -> dict[str, Tensor]:
    """The rows as TRL's generation hands them on. All are of one length here, so nothing is padded."""
    batch = {
        "prompt_ids": torch.tensor([row.prompt for row in rows]),
        "completion_ids": torch.tensor([row.completion for row in rows]),
        "advantages": torch.tensor([row.advantages for row in rows]),
        "num_items_in_batch": torch.tensor(sum(sum(row.sampled) for row in rows)),
    }
    batch["prompt_mask"] = torch.ones_like(batch["prompt_ids"])
    batch["completion_mask"] = torch.ones_like(batch["completion_ids"])
    if not all(all(row.sampled) for row in rows):
        batch["tool_mask"] = torch.tensor([row.sampled for row in rows])
    return batch


class GivenGRPOTrainer(GRPOTrainer):
    """Trains on given completions."""

    given: dict[str, Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
        return {name: x.to(self.accelerator.device) for name, x in self.given.items()}


class ScoredGRPOTrainer(GivenGRPOTrainer):
    """Projects the sampled positions only."""

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        self.scored = inputs.get("tool_mask", inputs["completion_mask"]).bool()
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, None]:
        with self.accelerator.autocast():
            hidden = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
            hidden = hidden.last_hidden_state[:, -logits_to_keep - 1 : -1][self.scored]
            log_pi = model.get_output_embeddings()(hidden).float().log_softmax(-1)
        targets = input_ids[:, -logits_to_keep:][self.scored]
        logps = log_pi.gather(-1, targets[:, None])[:, 0]
        with torch.no_grad():  # for the metric only
            entropy = -(log_pi.exp() * log_pi).sum(-1)
        empty = torch.zeros(self.scored.shape, device=logps.device)
        return empty.masked_scatter(self.scored, logps), empty.masked_scatter(self.scored, entropy), None


class StepByStep(TrainerCallback):
    """A step each time it is asked for, timed from where the loop begins it to where the loop ends it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.channel.wait():
            raise SystemExit(0)  # nothing is left to be saved

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.channel.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.channel.answer(float(logs["loss"]), float(logs["grad_norm"]))


def trainer_of(job: Job, channel: Channel, folder: str) -> GivenGRPOTrainer:
    rows = job.rows()
    arguments = GRPOConfig(
        output_dir=folder,
        use_cpu=job.device == "cpu",
        bf16=job.precision == "bf16",
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=len(rows) // job.micro_batch,
        num_generations=2,  # groups mean nothing for given advantages
        max_completion_length=len(rows[0].completion),
        num_iterations=1,
        beta=0.0,  # no reference
        loss_type="dapo",  # mean over all sampled tokens of the step
        temperature=1.0,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        weight_decay=job.weight_decay,
        max_grad_norm=job.max_grad_norm,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        max_steps=1000,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    if job.variant == "compact":
        trl.trainer.utils._use_triton = lambda device: True  # asked there for nothing but which positions to project
    owner = ScoredGRPOTrainer if job.variant == "scored" else GivenGRPOTrainer
    trainer = owner(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, attn_implementation="sdpa"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["never read"] * 4096}),
        processing_class=AutoTokenizer.from_pretrained(job.model),
        callbacks=[StepByStep(channel)],
    )
    trainer.given = batch_of(rows)
    return trainer


def main() -> None:
    runpy.run_path(str(ALLOCATOR))["keep_freed_memory"]()
    job = own_job()
    channel = Channel(job.device)
    torch.set_num_threads(job.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(job, channel, folder).train()


if __name__ == "__main__":
    main()
