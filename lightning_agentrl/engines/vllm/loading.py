"""New weights for vLLM's model in parts: what its `reload_weights` does with all of them.

That is in `vllm/model_executor/model_loader/reload/inplace.py` of vLLM 0.32, and in the method of that name of both
model runners (`vllm/v1/worker/gpu_model_runner.py` and `gpu/model_runner.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def begin(worker: Any) -> None:
    """Make the model take new weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(worker.model_runner.get_model())


def load(worker: Any, weights: Sequence[tuple[str, Tensor]]) -> None:
    """Load some weights; a module copies them once it has all of its own, and some only in :func:`finish`."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.get_model().load_weights(weights)


def finish(worker: Any) -> None:
    """Let the model be used, without what was computed with the old weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(worker.model_runner.get_model(), worker.vllm_config.model_config)
    worker.model_runner.reset_lora_state()
    worker.model_runner.reset_encoder_cache()
    worker.model_runner.reset_mm_cache()
