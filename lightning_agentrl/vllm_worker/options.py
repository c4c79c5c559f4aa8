"""Options of vLLM that servers and trainers agree on. Nothing is imported, so that a server starts soon."""

from typing import Literal

Transfer = Literal["folder", "nccl", "gloo"]  # how weights get to a server
MODE = "processed_logprobs"  # of the distribution sampled from, after temperature
CPU_BLOCK = 32  # tokens per block of the prefix cache; vLLM's default on a CPU, 128, is more than most prompts share
