"""The prefix tree of TRL's asynchronous GRPO trainer as a contender, in TRL's environment.

Its `TreeRow` packs the rows and its `tree_attention` reads them, as in `AsyncGRPOTrainer`, whose own loop needs a vLLM
server; the loop here is that of `plain.py` and projects scored positions only. FlashAttention 3 comes from the hub with
the package `kernels`. Without it, torch's FlashAttention 2 takes its place on a GPU, and on a CPU a loop over segments.
Started by `compare.py`; its micro-batch is counted in tokens.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl.experimental.async_grpo import packing

from benchmarks.speed.job import Channel, Job, own_job

# By its path: this environment lacks the package.
ALLOCATOR = Path(__file__).resolve().parents[2] / "lightning_agentrl" / "models" / "allocator.py"


class Flash2(torch.autograd.Function):
    """FlashAttention 2 as torch ships it, for segments of different lengths."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Any, ...], scale: float) -> Tensor:
        out, lse, *random = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, True, False, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse, *random[:2])
        ctx.bounds, ctx.scale = bounds, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *random = ctx.saved_tensors
        backward = torch.ops.aten._flash_attention_backward
        made = backward(grads[0].contiguous(), q, k, v, out, lse, *ctx.bounds, 0.0, True, *random, scale=ctx.scale)
        return *made, None, None


def flash2(q: Tensor, k: Tensor, v: Tensor, *bounds: Any, softmax_scale: float, **_: Any) -> Tensor:
    return Flash2.apply(q, k, v, bounds, softmax_scale)


def by_segments(
    q: Tensor, k: Tensor, v: Tensor, q_bounds: Tensor, k_bounds: Tensor, *_: Any, softmax_scale: float, **__: Any
) -> Tensor:
    outs = []
    for (a, b), (c, d) in zip(*(x.unfold(0, 2, 1).tolist() for x in (q_bounds, k_bounds)), strict=True):
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        one = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        out = torch.nn.functional.scaled_dot_product_attention(
            *one, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def choose_kernel(job: Job) -> str:
    """Set the kernel of TRL's attention and return its name."""
    if job.precision == "bf16":
        try:
            packing._flash_attn()
        except Exception:  # noqa: BLE001 - no package, no hub, no such GPU
            pass
        else:
            return "FlashAttention 3"
    flash = job.precision == "bf16" and job.device == "cuda"
    kernel = SimpleNamespace(flash_attn_varlen_func=flash2 if flash else by_segments)
    packing._flash_attn = lambda: kernel
    return "FlashAttention 2 in place of 3" if flash else "a loop over segments in place of FlashAttention 3"


def rows_of(job: Job) -> list[dict[str, Tensor]]:
    """Each packed row of at most a micro-batch of tokens, with the advantage of each trained token."""
    packed, row = [], packing.TreeRow()
    for number, turn in enumerate(job.rows()):
        ids = torch.tensor(turn.prompt + turn.completion)
        mask = torch.tensor([0] * len(turn.prompt) + turn.sampled)
        sample = {"input_ids": ids, "completion_mask": mask, "old_log_probs": torch.zeros(len(ids))}
        sample |= {"advantage": 0.0, "group_id": number, "given": turn.advantages}
        if row.samples and not row.fits(sample, job.micro_batch):
            packed.append(row)
            row = packing.TreeRow()
        row.add(sample)
    return [
        one.pack() | {"advantages": torch.tensor([a for sample in one.samples for a in sample["given"]])}
        for one in [*packed, row]
    ]


def loss_of(model: PreTrainedModel, row: dict[str, Tensor], total: int) -> Tensor:
    """This row's part of the mean over all sampled tokens."""
    queries, keys = row["tree_max_seqlens"].tolist()
    row = {name: x.to(model.device) for name, x in row.items()}
    tree = {name: row[f"tree_{name}"] for name in ("kv_index", "cu_seqlens_q", "cu_seqlens_k")}
    tree |= {"max_seqlen_q": queries, "max_seqlen_k": keys}
    inputs = {"input_ids": row["input_ids"][None], "position_ids": row["position_ids"][None], "use_cache": False}
    hidden = model.base_model(**inputs, **{f"tree_{name}": x for name, x in tree.items()}).last_hidden_state[0]
    logits = model.get_output_embeddings()(hidden[row["token_index"]]).float()
    targets = row["shift_labels"][row["token_index"]]
    logps = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    ratio = (logps - logps.detach()).exp()
    loss = torch.maximum(-row["advantages"] * ratio, -row["advantages"] * ratio.clamp(0.8, 1.2))
    return loss.sum() / total


def step(job: Job, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """One optimizer step, packing included; loss and gradient norm."""
    rows = rows_of(job)
    total = sum(len(row["token_index"]) for row in rows)
    optimizer.zero_grad(set_to_none=True)
    losses = []
    for row in rows:
        with torch.autocast(job.device, torch.bfloat16, enabled=job.precision == "bf16"):
            loss = loss_of(model, row, total)
        loss.backward()
        losses.append(loss.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
    optimizer.step()
    return float(sum(losses)), float(norm)


def main() -> None:
    runpy.run_path(str(ALLOCATOR))["keep_freed_memory"]()
    job = own_job()
    channel = Channel(job.device)
    torch.set_num_threads(job.threads)
    kernel = choose_kernel(job)
    packing.register_tree_attention()
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.float32, attn_implementation=packing.TREE_ATTENTION
    )
    model.to(job.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, weight_decay=job.weight_decay, fused=True)
    while channel.wait():
        loss, norm = step(job, model, optimizer)
        channel.stop()
        channel.answer(loss, norm, note=kernel)


if __name__ == "__main__":
    main()
