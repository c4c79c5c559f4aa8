"""Tiny random models in ordinary transformers folders, for tests that need a real model but not a good one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3TextConfig,
    GPTNeoXConfig,
    Idefics3Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolVLMConfig,
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
    "gemma3_text": Gemma3TextConfig,
    "phi3": Phi3Config,
}
Family = Literal["llama", "qwen2", "qwen3", "gpt_neox", "mistral", "gemma3_text", "phi3"]


VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
FAKE, IMAGE, GLOBAL, END_OF_UTTERANCE = "<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"
GEMMA3_MARKS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
GEMMA3_TURNS = ("<bos>", "<start_of_turn>", "<end_of_turn>")
# What the published templates do with images, in the same places and with the same default for the system message.
QWEN_CONTENT = (
    "{% macro shown(content) %}{% if content is string %}{{ content }}{% else %}{% for item in content %}"
    "{% if item['type'] == 'image' or 'image' in item %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in item %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
)
QWEN2_5_VL = QWEN_CONTENT + (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ shown(message['content']) }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3_VL = QWEN_CONTENT + (
    "{% if tools %}<|im_start|>system\n{% if messages[0]['role'] == 'system' %}{{ shown(messages[0]['content']) }}\n\n"
    "{% endif %}# Tools\n\n<tools>"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ shown(message['content']) }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "<|im_start|>{{ message['role'] }}\n{{ shown(message['content']) }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Of a content that is a string it writes nothing, as the published one does.
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}{% for item in message['content'] %}"
    "{% if item['type'] == 'text' %}{{ item['text'] }}{% elif item['type'] == 'image' %}<image>{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
VisionFamily = Literal[
    "qwen2_5_vl", "qwen3_vl", "smolvlm", "gemma3", "idefics3", "qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"
]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {  # layers with a state, of Qwen3.5 and its relatives
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def tiny_model_folder(
    path: Path,
    family: Family = "llama",
    vocab_words: Iterable[str] = (),
    seed: int = 0,
    head_dim: int = 8,
    tokenizer: PreTrainedTokenizerFast | None = None,
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
        tokenizer: of the model, if not a tiny one.
        settings: further ones of the family's config.
    """
    tokenizer = tokenizer or tiny_tokenizer(vocab_words)
    config = CONFIGS[family](
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # weights are large enough that outputs depend on the prompt
        **({"num_hidden_layers": 2, "initializer_range": 0.3, "max_position_embeddings": 2048} | settings),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)


def tiny_vision_folder(
    path: Path,
    family: VisionFamily = "qwen3_vl",
    vocab_words: Iterable[str] = (),
    seed: int = 0,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    head_dim: int = 16,
    tower_size: int = 32,
    tower_layers: int = 2,
    patch_size: int = 8,
    image_side: int = 3,
    image_tokens: int = 256,
    initializer_range: float = 0.15,
    tie_word_embeddings: bool = True,
    **text_settings: Any,
) -> Path:
    """Write a tiny random vision-language model to `path`, with tokenizer, chat template and image processor.

    It needs no torchvision: `AutoImageProcessor.from_pretrained(path, backend="pil")`. Two patches in each direction
    are a token. Images of the Qwen families have 4 tokens at least, those of the others `image_side` by `image_side`.

    Args:
        path: folder to write, made if missing.
        family: architecture.
        vocab_words: text that the tokenizer is trained on besides its own sentences.
        seed: of the weights.
        hidden_size: of the text model.
        layers: of the text model.
        head_dim: width of an attention head of the text model; vLLM has none below 32.
        tower_size: hidden size of the model that reads images.
        tower_layers: layers of the model that reads images.
        patch_size: side of a patch in pixels.
        image_side: side of an image in tokens, where all images have one size.
        image_tokens: the most tokens of an image, where images have different sizes.
        initializer_range: of all weights; large, so that outputs depend on the input.
        tie_word_embeddings: whether the output head is the embedding.
        text_settings: further ones of the text config.
    """
    qwen, gemma = family.startswith("qwen"), family == "gemma3"
    further = (VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD) if qwen else (FAKE, IMAGE, GLOBAL, END_OF_UTTERANCE)
    if gemma:
        further = (*GEMMA3_MARKS, *GEMMA3_TURNS)
    tokenizer = tiny_tokenizer(vocab_words, further)
    tokenizer.chat_template = (QWEN2_5_VL if "qwen2" in family else QWEN3_VL) if qwen else SMOLVLM
    if gemma:
        tokenizer.chat_template = Path(__file__).with_name("chat_templates").joinpath("gemma3.jinja").read_text()
        tokenizer.bos_token, tokenizer.eos_token = "<bos>", "<end_of_turn>"
    elif not qwen:
        tokenizer.eos_token = END_OF_UTTERANCE
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in further}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // head_dim,
        "num_key_value_heads": max(1, hidden_size // head_dim // 2),
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "initializer_range": initializer_range,
        **special,
        **text_settings,
    }
    tower = {
        "hidden_size": tower_size,
        "intermediate_size": 2 * tower_size,
        "patch_size": patch_size,
        "initializer_range": initializer_range,
    }
    config = (_qwen_vl if qwen else _gemma3 if gemma else _idefics3)(family, text, tower, tower_layers, image_side, ids)
    config.tie_word_embeddings = tie_word_embeddings
    for name, value in special.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        if gemma:  # it is drawn as 0, so that images would show nothing
            nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=initializer_range)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    area = (2 * patch_size) ** 2  # of a token
    processor = (
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": patch_size,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": 4 * area, "longest_edge": image_tokens * area},
            **(half if family == "qwen3_vl" else {}),
        }
        if qwen
        else {
            "image_processor_type": "SmolVLMImageProcessor" if family == "smolvlm" else "Idefics3ImageProcessor",
            "do_image_splitting": True,
            "max_image_size": {"longest_edge": 2 * patch_size * image_side},
            "size": {"longest_edge": 8 * patch_size * image_side},
            **half,
        }
    )
    if gemma:
        size = dict.fromkeys(("height", "width"), 2 * patch_size * image_side)
        processor = {"image_processor_type": "Gemma3ImageProcessor", "size": size, **half}
    (Path(path) / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))
    return Path(path)


def _qwen_vl(
    family: str, text: dict[str, Any], tower: dict[str, Any], tower_layers: int, image_side: int, ids: dict[str, int]
) -> PreTrainedConfig:
    third = text["head_dim"] // 16
    tower |= {"depth": tower_layers, "num_heads": 2, "out_hidden_size": text["hidden_size"]}
    special = {
        "image_token_id": ids[IMAGE_PAD],
        "video_token_id": ids[VIDEO_PAD],
        "vision_start_token_id": ids[VISION_START],
        "vision_end_token_id": ids[VISION_END],
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    if family in ("qwen2_vl", "qwen2_5_vl"):
        text = {name: value for name, value in text.items() if name != "head_dim"}
        text["rope_parameters"] = rope | {"mrope_section": [2 * third, 3 * third, 3 * third]}
        if family == "qwen2_vl":
            tower |= {"embed_dim": tower["hidden_size"], "hidden_size": text["hidden_size"], "mlp_ratio": 2}
        tower |= {"window_size": 4 * tower["patch_size"], "fullatt_block_indexes": [tower_layers - 1]}
    else:
        text["rope_parameters"] = rope | {"mrope_section": [4 * third, 2 * third, 2 * third], "mrope_interleaved": True}
        tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    if family.startswith("qwen3_5"):
        text = DELTA | text
        text["rope_parameters"]["partial_rotary_factor"] = 1.0
    return CONFIG_MAPPING[family](
        text_config=(EXPERTS if family.endswith("moe") else {}) | text, vision_config=tower, **special
    )


def _idefics3(
    family: str, text: dict[str, Any], tower: dict[str, Any], tower_layers: int, image_side: int, ids: dict[str, int]
) -> PreTrainedConfig:
    tower |= {
        "num_hidden_layers": tower_layers,
        "num_attention_heads": 2,
        "image_size": 2 * tower["patch_size"] * image_side,
    }
    kind = SmolVLMConfig if family == "smolvlm" else Idefics3Config
    return kind(
        text_config=text | {"model_type": "llama"},
        vision_config=tower,
        scale_factor=2,
        image_token_id=ids[IMAGE],
        pad_token_id=text["pad_token_id"],
    )


def _gemma3(
    family: str, text: dict[str, Any], tower: dict[str, Any], tower_layers: int, image_side: int, ids: dict[str, int]
) -> PreTrainedConfig:
    """With a window shorter than an image, in every other layer.

    In the last layer, what image tokens see changes no text token, so one layer stands behind a layer of each kind.
    """
    layers = text["num_hidden_layers"] + 1
    own = {
        "num_hidden_layers": layers,
        "sliding_window": 7,
        "layer_types": (["sliding_attention", "full_attention"] * layers)[:layers],
        "query_pre_attn_scalar": text["head_dim"],
    }
    tower |= {
        "num_hidden_layers": tower_layers,
        "num_attention_heads": 2,
        "image_size": 2 * tower["patch_size"] * image_side,
        "vision_use_head": False,
    }
    marks = dict(zip(("boi", "eoi", "image"), map(ids.__getitem__, GEMMA3_MARKS), strict=True))
    return CONFIG_MAPPING[family](
        text_config=text | own,
        vision_config=tower,
        mm_tokens_per_image=image_side**2,
        **{f"{name}_token_index": number for name, number in marks.items()},
    )


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


def tiny_tokenizer(vocab_words: Iterable[str] = (), special: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most `VOCABULARY` tokens with the ChatML template; any text can be encoded.

    Args:
        vocab_words: text that it is trained on besides its own sentences.
        special: tokens, besides those of the template.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END, *special],
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
