"""Chat templates of the families that people use, reduced to how they mark roles, and a small tokenizer for each."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Marks:
    """What stands before and after a message of each role; ``special`` are tokens, all else is plain text.

    With ``in_user`` the system message is part of the first user message.
    """

    system: tuple[str, str]
    user: tuple[str, str]
    reply: tuple[str, str]
    special: tuple[str, ...]
    header: str = ""  # of the reply that follows
    in_user: bool = False

    @property
    def template(self) -> str:
        (s0, s1), (u0, u1), (a0, a1) = self.system, self.user, self.reply
        header = self.header or a0
        if self.in_user:
            return (
                "{% set ns = namespace(head='') %}{% for m in messages %}{% if m.role == 'system' %}"
                f"{{% set ns.head = {s0!r} + m.content + {s1!r} %}}{{% elif m.role == 'user' %}}"
                f"{{{{ {u0!r} + ns.head + m.content + {u1!r} }}}}{{% set ns.head = '' %}}{{% else %}}"
                f"{{{{ {a0!r} + m.content + {a1!r} }}}}{{% endif %}}{{% endfor %}}"
                f"{{% if add_generation_prompt %}}{{{{ {header!r} }}}}{{% endif %}}"
            )
        return (
            f"{{% for m in messages %}}{{% if m.role == 'system' %}}{{{{ {s0!r} + m.content + {s1!r} }}}}"
            f"{{% elif m.role == 'user' %}}{{{{ {u0!r} + m.content + {u1!r} }}}}{{% else %}}"
            f"{{{{ {a0!r} + m.content + {a1!r} }}}}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {header!r} }}}}{{% endif %}}"
        )


def _alike(start: str, middle: str, end: str, special: tuple[str, ...], reply: str = "assistant") -> Marks:
    """Return the marks of a template that writes the role's name between two strings."""
    first, second, third = ((f"{start}{role}{middle}", end) for role in ("system", "user", reply))
    return Marks(first, second, third, special)


TEMPLATES = {
    "chatml": _alike("<|im_start|>", "\n", "<|im_end|>\n", ("<|im_start|>", "<|im_end|>")),
    "chatml_thinking": Marks(
        ("<|im_start|>system\n", "<|im_end|>\n"),
        ("<|im_start|>user\n", "<|im_end|>\n"),
        ("<|im_start|>assistant\n", "<|im_end|>\n"),
        ("<|im_start|>", "<|im_end|>"),
        header="<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "llama2": Marks(
        ("<<SYS>>\n", "\n<</SYS>>\n\n"), ("<s>[INST] ", " [/INST]"), (" ", " </s>"), ("<s>", "</s>"), in_user=True
    ),
    "llama3": _alike(
        "<|start_header_id|>",
        "<|end_header_id|>\n\n",
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "mistral_v1": Marks(("", "\n\n"), ("[INST] ", " [/INST]"), (" ", "</s>"), ("<s>", "</s>"), in_user=True),
    "mistral_v7": Marks(
        ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        ("[INST]", "[/INST]"),
        ("", "</s>"),
        ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "</s>"),
    ),
    "zephyr": _alike("<|", "|>\n", "</s>\n", ("</s>",)),
    "olmo2": Marks(
        ("<|endoftext|><|system|>\n", "\n"),
        ("<|user|>\n", "\n"),
        ("<|assistant|>\n", "<|endoftext|>\n"),
        ("<|endoftext|>",),
    ),
    "gemma": _alike("<start_of_turn>", "\n", "<end_of_turn>\n", ("<start_of_turn>", "<end_of_turn>"), reply="model"),
    "phi3": _alike("<|", "|>\n", "<|end|>\n", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "vicuna": Marks(("", "\n\n"), ("USER: ", " "), ("ASSISTANT: ", "</s>"), ("</s>",), header="ASSISTANT:"),
    "alpaca": Marks(
        ("", "\n\n"),
        ("### Instruction:\n", "\n\n"),
        ("### Response:\n", "</s>\n\n"),
        ("</s>",),
        header="### Response:\n",
    ),
    "openchat": Marks(
        ("GPT4 Correct System: ", "<|end_of_turn|>"),
        ("GPT4 Correct User: ", "<|end_of_turn|>"),
        ("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
        ("<|end_of_turn|>",),
        header="GPT4 Correct Assistant:",
    ),
    "deepseek": Marks(
        ("", ""),
        ("<｜User｜>", ""),
        ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    ),
    "granite": _alike(
        "<|start_of_role|>",
        "<|end_of_role|>",
        "<|end_of_text|>\n",
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    ),
    "falcon": Marks(
        ("System: ", "\n"), ("User: ", "\n"), ("Falcon: ", "<|endoftext|>\n"), ("<|endoftext|>",), header="Falcon:"
    ),
}


def make_tokenizer(marks: Marks, normalized: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the template.

    Args:
        marks: of the template.
        normalized: compatibility characters become plain ones (NFKC), before special tokens are looked for.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    if normalized:
        core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=normalized) for text in marks.special])
    closing = next(text for text in sorted(marks.special, key=marks.reply[1].find) if text in marks.reply[1])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=AddedToken(closing, normalized=normalized))
    tokenizer.chat_template = marks.template
    tokenizer.name_or_path = "models/tiny"
    return tokenizer
