"""Tiny random models in ordinary transformers folders, for tests that need a real model but not a good one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2
VOCABULARY = 384
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = (
    "system\nYou are an agent in a room. Choose one action.",
    "user\nObservation: a red ball is 2 steps forward and 1 step left. a wall is 3 steps right.",
    "assistant\nTHINK: the ball is in front of me.\nACTION: go forward",
    "turn left, turn right, go forward, pick up, drop, toggle",
    "What will you do next? Reply with one action.",
)
CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gpt_neox": GPTNeoXConfig,
    "mistral": MistralConfig,
}


def tiny_model_folder(
    path: Path,
    family: Literal["llama", "qwen2", "qwen3", "gpt_neox", "mistral"] = "llama",
    vocab_words: Iterable[str] = (),
    seed: int = 0,
    head_dim: int = 8,
    **settings: Any,
) -> Path:
    """Write a tiny random model with its tokenizer to `path`; equal arguments give equal files.

    Args:
        path: folder to write, made if missing.
        family: architecture; "qwen3" normalises queries and keys, "qwen2" has biases on them; "gpt_neox" alone computes
            its norms in the dtype of its weights, so that float64 is exact.
        vocab_words: text that the tokenizer is trained on besides its own sentences, so that it needs few tokens.
        seed: of the weights.
        head_dim: width of an attention head; vLLM has none below 32.
        settings: further ones of the family's config.
    """
    tokenizer = tiny_tokenizer(vocab_words)
    config = CONFIGS[family](
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.3,  # large enough that outputs depend on the prompt
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)


def small_model(
    family: Literal["qwen2", "qwen3"],
    vocab_size: int,
    eos_token_id: int | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """A random model of six layers with the proportions of a real one: large enough that rounding shows.

    Args:
        family: architecture.
        vocab_size: of its vocabulary.
        eos_token_id: of its config.
        attn_implementation: how it attends.
    """
    config = CONFIGS[family](
        vocab_size=vocab_size,
        hidden_size=448,
        intermediate_size=1216,
        num_hidden_layers=6,
        num_attention_heads=7,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=True,
        eos_token_id=eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)


def tiny_tokenizer(vocab_words: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most `VOCABULARY` tokens with the ChatML template; any text can be encoded."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([*SENTENCES, *vocab_words], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=2048,
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )
