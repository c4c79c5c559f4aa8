"""Small random models whose vocabulary is the words of a task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

PAD, START, END = "<pad>", "<start>", "<end>"  # special tokens; unknown words are read as padding
TEMPLATE = (
    f"{{% for message in messages %}}{START}{{{{ message['content'] }}}}{END}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{START}{{% endif %}}"
)


def word_model(
    words: Sequence[str], folder: Path, seed: int = 0, phrases: Sequence[str] = (), positions: int = 128
) -> Path:
    """Write a random two-layer Llama and its tokenizer to a folder, and return the folder.

    Initial weights are large enough that replies depend on the prompt. With weights near 0 the policies of all
    observations first change together, and words that are right for few observations become too rare to be sampled.

    Args:
        words: vocabulary of the task.
        folder: folder to write to.
        seed: seed of the weights.
        phrases: replies of one or several words that become single tokens; given phrases are far more likely than other
            words at first.
        positions: context length in tokens.
    """
    ids = {word: i for i, word in enumerate(dict.fromkeys([PAD, START, END, *words]))}
    tokens = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=PAD,
        chat_template=TEMPLATE,
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=positions,
        initializer_range=0.3,
        pad_token_id=ids[PAD],
        bos_token_id=ids[START],
        eos_token_id=ids[END],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    if phrases:
        said = tokenizer.convert_tokens_to_ids(list(phrases))
        with torch.no_grad():
            kept = model.lm_head.weight[said].clone()
            model.lm_head.weight.zero_()
            model.lm_head.weight[said] = kept
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
