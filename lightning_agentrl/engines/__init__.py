"""What samples tokens."""

from lightning_agentrl.engines.base import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.engines.transformers_engine import TransformersEngine
from lightning_agentrl.engines.vllm_engine import VLLMEngine

__all__ = ["Engine", "PolicyHandle", "Reply", "SamplingRequest", "TransformersEngine", "VLLMEngine"]
