"""Reward model: a sequence classifier that scores a prompt with its reply."""

from __future__ import annotations

import math
import threading
from typing import Any, cast

import torch
from jinja2.exceptions import TemplateError
from safetensors import SafetensorError
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BatchEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_agentrl.episodes.tasks import Scorer
from lightning_agentrl.errors import first_line
from lightning_agentrl.prompts.template import RunDate, Untrusted, rendered, role_markers, special_strings

MAX_CHARS = 1 << 20  # largest length of a prompt or reply; no classifier's context is as long
_READING = threading.Lock()  # lock, since the classifier reads one pair at a time


class RewardModel(Scorer):
    """Scorer with a transformers sequence classifier whose only output is the reward.

    The classifier is loaded once in each process, on the policy's device. Prompt and reply are formatted as a
    conversation if the classifier's tokenizer has a chat template, else as a pair. The answers of tasks are not used.

    Args:
        model: hub id or local folder of the classifier.
    """

    needs_answer = False

    def __init__(self, model: str) -> None:
        self.model = model
        self.release()

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings without the loaded model, for copies."""
        return {**vars(self), "_classifier": None, "_tokenizer": None, "_dated": {}, "_safe": None}

    def release(self) -> None:
        """Release the model."""
        self._classifier: PreTrainedModel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._dated: dict[str, Any] = {}
        self._safe: Untrusted | None = None

    def start(self, device: torch.device) -> None:
        """Load the model if it is not loaded yet.

        Raises:
            ValueError: the model cannot be loaded, or does not have exactly one output.
        """
        if self._classifier is not None:
            return
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
                f"the reward model '{self.model}' has {classifier.config.num_labels} outputs, but must have exactly "
                f"one; choose another model (key {self.key}.init_args.model)"
            )
        if found["missing_keys"]:
            raise ValueError(
                f"the files of the reward model '{self.model}' lack {min(found['missing_keys'])}, which would be "
                f"random; choose a model that was trained as a reward model (key {self.key}.init_args.model)"
            )
        # With a padding id, decoders score the last token that is not padding; but the padding id may also end a text.
        classifier.config.pad_token_id = classifier.config.get_text_config().pad_token_id = None
        self._classifier = classifier.to(device).eval().requires_grad_(False)

    def score(self, prompt: str, reply: str, answer: str | None) -> float:
        """Return the model's output.

        Raises:
            ValueError: prompt and reply are longer than the model's context.
        """
        encoded = self._encode(prompt, reply)
        assert self._classifier is not None
        with _READING, torch.no_grad():
            inputs = {name: torch.tensor([row], device=self._classifier.device) for name, row in encoded.items()}
            return float(self._classifier(**inputs).logits[0, 0])

    def _encode(self, prompt: str, reply: str) -> BatchEncoding:
        assert self._tokenizer is not None
        assert self._classifier is not None
        assert self._safe is not None
        prompt, reply = self._safe(prompt), self._safe(reply)
        if self._tokenizer.chat_template:
            text = _conversation(self._tokenizer, prompt, reply, self._dated)
            encoded = self._tokenizer(text, add_special_tokens=False)
        else:
            encoded = self._tokenizer(prompt, reply)
        length = len(cast(list[int], encoded["input_ids"]))
        positions = getattr(self._classifier.config, "max_position_embeddings", None) or math.inf
        longest = min(positions, self._tokenizer.model_max_length)  # RoBERTa's positions do not start at 0
        if length > longest:
            raise ValueError(
                f"prompt and reply have {length} tokens, and the reward model '{self.model}' reads at most "
                f"{longest}; lower max_reply_tokens of data.init_args.interaction, or choose another model"
            )
        return encoded

    @staticmethod
    def _markers(tokenizer: PreTrainedTokenizerBase) -> set[str]:
        """Return the strings with which the chat template marks roles; empty without a chat template."""
        if not tokenizer.chat_template:
            return set()
        contents = "probe of a prompt", "probe of a reply"
        return role_markers(_conversation(tokenizer, *contents, {}), contents, special_strings(tokenizer))


def _conversation(tokenizer: PreTrainedTokenizerBase, prompt: str, reply: str, dated: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    return rendered(tokenizer, messages, **dated)
