"""Transformers without sharing as a contender: every turn is a row of its own, computed from its first token.

As fast as that goes: rows of one length without padding, a plain attention mask, the vocabulary projection on scored
positions only, no entropy. Started by `compare.py`; its micro-batch is counted in tokens.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.speed.job import Channel, Job, own_job
from benchmarks.speed.layouts import Row
from benchmarks.speed.logits import LargestLogits
from lightning_agentrl.models.allocator import keep_freed_memory


def loss_of(model: PreTrainedModel, rows: list[Row], total: int) -> Tensor:
    """These rows' part of the mean over all sampled tokens."""
    ids = torch.tensor([row.prompt + row.completion for row in rows], device=model.device)
    prompt = len(rows[0].prompt)
    advantages = torch.tensor([row.advantages for row in rows], device=model.device)
    inputs = ids[:, :-1]  # what follows the last token is not asked for
    hidden = model.base_model(input_ids=inputs, attention_mask=torch.ones_like(inputs), use_cache=False)
    logits = model.get_output_embeddings()(hidden.last_hidden_state[:, prompt - 1 :])
    targets = ids[:, prompt:]
    logps = -torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    ratio = (logps - logps.detach()).exp().view_as(advantages)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return loss.sum() / total


def main() -> None:
    keep_freed_memory()
    job = own_job()
    channel = Channel(job.device)
    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, attn_implementation="sdpa")
    model.to(job.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, weight_decay=job.weight_decay, fused=True)
    rows = job.rows()
    watch = LargestLogits()
    while channel.wait():
        with watch if job.variant == "logits" else nullcontext():
            loss, norm = step(job, model, optimizer, rows)
        channel.stop()
        channel.answer(loss, norm, largest_logits=watch.bytes)


def step(job: Job, model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: list[Row]) -> tuple[float, float]:
    """One optimizer step; loss and gradient norm."""
    total = sum(sum(row.sampled) for row in rows)
    size = max(1, job.micro_batch // (len(rows[0].prompt) + len(rows[0].completion) - 1))
    sum_of_losses = 0.0
    optimizer.zero_grad(set_to_none=True)
    for first in range(0, len(rows), size):
        with torch.autocast(job.device, torch.bfloat16, enabled=job.precision == "bf16"):
            loss = loss_of(model, rows[first : first + size], total)
        loss.backward()
        sum_of_losses += float(loss.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
    optimizer.step()
    return sum_of_losses, float(norm)


if __name__ == "__main__":
    main()
