"""Engines, which sample replies."""

from lightning_agentrl.engines.base import Engine, EngineMemory, PlannedPolicy, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.engines.transformers.engine import TransformersEngine
from lightning_agentrl.engines.vllm.engine import VLLMEngine
from lightning_agentrl.engines.vllm_server.engine import VLLMServerEngine

__all__ = [
    "Engine",
    "EngineMemory",
    "PlannedPolicy",
    "PolicyHandle",
    "Reply",
    "SamplingRequest",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServerEngine",
]
