"""What samples tokens."""

from lightning_agentrl.engines.base import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.engines.transformers_engine import TransformersEngine

__all__ = ["Engine", "PolicyHandle", "Reply", "SamplingRequest", "TransformersEngine"]
