"""Prompts and replies: prompt format, chat template, memory, parser."""

from lightning_agentrl.prompts.memory import (
    ActionsOnlyMemory,
    ClearingMemory,
    FullMemory,
    Memory,
    NotebookMemory,
    WindowMemory,
)
from lightning_agentrl.prompts.messages import PromptFormat
from lightning_agentrl.prompts.parser import ActionParser, RawParser, TolerantParser
from lightning_agentrl.prompts.renderer import ChatRenderer

__all__ = [
    "ActionParser",
    "ActionsOnlyMemory",
    "ChatRenderer",
    "ClearingMemory",
    "FullMemory",
    "Memory",
    "NotebookMemory",
    "PromptFormat",
    "RawParser",
    "TolerantParser",
    "WindowMemory",
]
