"""Two ways to send tensors over the network: NCCL, by vLLM's own code, and gloo, the same between main memories."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch

from lightning_agentrl.engines.vllm.kept_process import kept_process
from lightning_agentrl.engines.vllm_server.background_loop import in_thread
from lightning_agentrl.engines.vllm_server.transfer_source import Calls, WeightSource
from lightning_agentrl.vllm_worker.gloo_group import GlooGroup, open_store

THREAD = "weights"


@dataclass(frozen=True)
class Rendezvous:
    """Where a new group meets, and its size."""

    address: str  # of the trainer, as seen from the server
    workers: int  # processes of the server that hold weights
    seconds: float  # most that one tensor may take; by NCCL, all of them


class GlooSender:
    """A sender over gloo: does what vLLM's own code does with NCCL, without vLLM.

    It joins the group with a server at once.

    Raises:
        Lost: the server is gone.
        ValueError: it refuses.
        RuntimeError: it did not join in time.
    """

    def __init__(self, rendezvous: Rendezvous, calls: Calls, source: WeightSource) -> None:
        self._calls, self._source = calls, source
        self._store = open_store(rendezvous.address)
        size = 1 + rendezvous.workers
        meeting = {"master_address": rendezvous.address, "master_port": self._store.port}
        meeting |= {"world_size": size, "rank_offset": 1}  # as vLLM's own sender tells it
        answered = in_thread(partial(calls.init_weight_transfer_engine, meeting), THREAD)
        self._group: GlooGroup | None = GlooGroup(
            self._store, 0, size, rendezvous.address, timedelta(seconds=rendezvous.seconds)
        )
        answered.result()

    def send_weights(self) -> None:
        """Send all weights of the source, with the steps around it; wait until the server has loaded them."""
        assert self._group is not None
        forms = self._source.metadata()
        announced = {
            "names": [form.name for form in forms],
            "dtype_names": [str(form.dtype).removeprefix("torch.") for form in forms],
            "shapes": [list(form.shape) for form in forms],
        }
        self._calls.start_weight_update()
        answered = in_thread(partial(self._calls.update_weights, announced), THREAD)  # the server waits for the tensors
        for _, weight in self._source:
            self._group.broadcast(weight)
        answered.result()
        self._calls.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the group with the server."""
        self._group = None


class NCCLSender:
    """A sender over NCCL by vLLM's own code; needs vLLM on the trainer's side, and a GPU on both sides.

    vLLM sends on the current stream. That of the trainer would wait for a server that hangs, and the update with it;
    so this has one of its own. NCCL knows no time limit; after that of the rendezvous the group is aborted.

    Raises what :class:`GlooSender` does.
    """

    def __init__(self, rendezvous: Rendezvous, calls: Calls, source: WeightSource) -> None:
        with kept_process(source.device):
            from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
            from vllm.utils.network_utils import get_open_port

        self._calls, self._device, self._seconds = calls, source.device, rendezvous.seconds
        torch.cuda.set_device(self._device)  # of this thread
        self._stream = torch.cuda.Stream(self._device)
        meeting = NCCLTrainerInitInfo(
            master_address=rendezvous.address,
            master_port=get_open_port(),
            world_size=1 + rendezvous.workers,
            packed=False,  # packing buffers would take gigabytes of GPU memory
            rank=0,
        )
        with torch.cuda.stream(self._stream):
            self._sender = WeightTransferTrainerFactory.trainer_init(meeting, client=calls, source=source)

    def send_weights(self) -> None:
        torch.cuda.set_device(self._device)  # of this thread too
        late, fault = threading.Event(), None

        def give_up() -> None:
            late.set()
            self._calls.cancel()  # else the sender would go on waiting for the server's answer
            self.shutdown()

        limit = threading.Timer(self._seconds, give_up)
        limit.daemon = True
        limit.start()
        try:
            with torch.cuda.stream(self._stream):
                self._sender.send_weights()
        except BaseException as error:
            if not late.is_set():
                raise
            fault = error
        finally:
            limit.cancel()
        if late.is_set():  # an aborted group sends nothing, and not always with an error
            raise RuntimeError(f"NCCL has not sent the weights within {self._seconds:.0f} s") from fault

    def shutdown(self) -> None:
        self._sender.shutdown()


Sender = GlooSender | NCCLSender
