"""A reward model: a sequence classifier that scores a prompt with its reply."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jinja2.exceptions import TemplateError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lightning_agentrl.episodes.judge import usable_device
from lightning_agentrl.episodes.tasks import Scorer
from lightning_agentrl.errors import first_line
from lightning_agentrl.prompts.template import RunDate, rendered
from lightning_agentrl.prompts.untrusted import Untrusted, role_markers, special_strings

MAX_CHARS = 1 << 20  # of a prompt or a reply; longer than the context of any classifier
_OF_RUNS = ("_classifier", "_tokenizer", "_dated", "_safe", "_queue", "_queue_lock", "_reading")


@dataclass
class _Waiting:
    """A pair of prompt and reply, and its score once it is there."""

    ids: list[int]
    types: list[int]  # which of the two texts a token belongs to
    score: float | None = None
    error: Exception | None = None


class RewardModel(Scorer):
    """A transformers sequence classifier with one output, which is the reward; loaded once in each process.

    Prompt and reply are read as a conversation where the classifier's tokenizer has a chat template, else as a pair.
    The answers of tasks are not used.

    Args:
        model: hub id or local folder.
        device: where it runs, such as ``cpu`` or ``cuda:1``; the device of the policy when not given.
        max_batch: most pairs in one forward pass. From 2 on, time decides which pairs share one, and so the last bits
            of their scores.
    """

    needs_answer = False

    def __init__(self, model: str, device: str | None = None, max_batch: int = 1) -> None:
        if max_batch < 1:
            raise ValueError(f"RewardModel: max_batch must be at least 1, got {max_batch}")
        self.model, self.device, self.max_batch = model, device, max_batch
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Set all that a run changes to what it is before the first one; ``_OF_RUNS`` are its names."""
        self._classifier: PreTrainedModel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._dated: dict[str, Any] = {}
        self._safe: Untrusted | None = None
        self._queue: list[_Waiting] = []
        self._queue_lock, self._reading = threading.Lock(), threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: the settings, and nothing that is loaded."""
        return {name: value for name, value in vars(self).items() if name not in _OF_RUNS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_anew()

    def start(self, device: torch.device) -> None:
        """Load the model, unless it is loaded.

        Raises:
            ValueError: the model cannot be loaded, or does not have exactly one output.
        """
        if self._classifier is not None:
            return
        device = usable_device(self.device, f"{self.key}.init_args.device") or device
        try:
            self._tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(self.model))
            classifier, found = AutoModelForSequenceClassification.from_pretrained(
                self.model, dtype="auto", output_loading_info=True
            )
            self._dated = (self.date or RunDate()).arguments(self._tokenizer)
            self._safe = Untrusted(self._tokenizer, self._markers(self._tokenizer), MAX_CHARS)
        except (OSError, ValueError, ImportError, SafetensorError, TemplateError) as error:
            raise ValueError(
                f"the reward model '{self.model}' cannot be loaded: {first_line(error)} (key "
                f"{self.key}.init_args.model)"
            ) from error
        if classifier.config.num_labels != 1:
            raise ValueError(
                f"the reward model '{self.model}' has {classifier.config.num_labels} outputs, and a reward is one "
                f"number; give a model with one (key {self.key}.init_args.model)"
            )
        if found["missing_keys"]:
            raise ValueError(
                f"the files of the reward model '{self.model}' lack {min(found['missing_keys'])}, so chance would "
                f"stand in its place; give a model that was trained to reward (key {self.key}.init_args.model)"
            )
        self._classifier = classifier.to(device).eval().requires_grad_(False)

    def release(self) -> None:
        """Leave the model."""
        self._begin_anew()

    def score(self, prompt: str, reply: str, answer: str | None) -> float:
        """Return the model's output. The first thread to come scores the pairs of all that wait, in batches.

        Raises:
            ValueError: prompt and reply are longer than the model's context.
        """
        waiting = self._encode(prompt, reply)
        with self._queue_lock:
            self._queue.append(waiting)
        with self._reading:
            while waiting.score is None and waiting.error is None:
                with self._queue_lock:
                    batch, self._queue = self._queue[: self.max_batch], self._queue[self.max_batch :]
                self._settle(batch)
        if waiting.error is not None:
            raise waiting.error
        assert waiting.score is not None
        return waiting.score

    def _settle(self, batch: Sequence[_Waiting]) -> None:
        try:
            for item, score in zip(batch, self._read(batch), strict=True):
                item.score = score
        except BaseException as error:  # handed to every thread that waits for this batch
            fault = error if isinstance(error, Exception) else RuntimeError(f"the reward model has raised {error!r}")
            for item in batch:
                item.error = fault
            if fault is not error:
                raise

    def _encode(self, prompt: str, reply: str) -> _Waiting:
        assert self._tokenizer is not None
        assert self._classifier is not None
        assert self._safe is not None
        prompt, reply = self._safe(prompt), self._safe(reply)
        if self._tokenizer.chat_template:
            text = _conversation(self._tokenizer, prompt, reply, self._dated)
            encoded = self._tokenizer(text, add_special_tokens=False)
        else:
            encoded = self._tokenizer(prompt, reply)
        ids = cast(list[int], encoded["input_ids"])
        positions = getattr(self._classifier.config, "max_position_embeddings", None) or math.inf
        longest = min(positions, self._tokenizer.model_max_length)  # RoBERTa's do not begin at the first position
        if len(ids) > longest:
            raise ValueError(
                f"prompt and reply have {len(ids)} tokens, and the reward model '{self.model}' reads at most "
                f"{longest}; lower max_reply_tokens of data.init_args.interaction, or give another model"
            )
        return _Waiting(ids, cast(list[int], encoded.get("token_type_ids", [])))

    @staticmethod
    def _markers(tokenizer: PreTrainedTokenizerBase) -> set[str]:
        """Return what the chat template writes to tell roles apart; nothing without one."""
        if not tokenizer.chat_template:
            return set()
        contents = "probe of a prompt", "probe of a reply"
        return role_markers(_conversation(tokenizer, *contents, {}), contents, special_strings(tokenizer))

    @torch.no_grad()
    def _read(self, batch: Sequence[_Waiting]) -> list[float]:
        """Return the scores of rows, padded on the right with an id that none of them has.

        Decoders look for the last token that is not padding; an id that also ends texts would hide their real end.
        """
        assert self._classifier is not None
        config, device = self._classifier.config.get_text_config(), self._classifier.device
        used = {i for item in batch for i in item.ids}
        padding = next(i for i in range(config.vocab_size) if i not in used)
        self._classifier.config.pad_token_id = config.pad_token_id = padding

        def rows(numbers: Sequence[list[int]], fill: int) -> Tensor:
            width = max(map(len, numbers))
            return torch.tensor([row + [fill] * (width - len(row)) for row in numbers], device=device)

        inputs = {
            "input_ids": rows([item.ids for item in batch], padding),
            "attention_mask": rows([[1] * len(item.ids) for item in batch], 0),
        }
        if batch[0].types:
            inputs["token_type_ids"] = rows([item.types for item in batch], 0)
        output: Any = self._classifier(**inputs)
        return [float(x) for x in output.logits[:, 0].float().cpu()]


def _conversation(tokenizer: PreTrainedTokenizerBase, prompt: str, reply: str, dated: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    return rendered(tokenizer, messages, **dated)
