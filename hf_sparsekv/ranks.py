"""The ranks of a tensor parallel model: loading, their group, and decisions that all of them must make alike.

transformers spreads a model's layers over processes (``tp_plan="auto"``, torchrun). Every rank runs the same forward
pass on its share of the heads, and waits in each layer for the all-reduce. So a rank must run a pass when the others
do, or all of them wait forever. Conditions that decide this, and may differ between ranks, are agreed on here, on the
host, by gloo.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

AGREE = timedelta(minutes=10)  # how long a rank waits for the others, which may be compiling kernels

_made: weakref.WeakKeyDictionary[nn.Module, Ranks] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def spread() -> dict:
    """Arguments of ``from_pretrained`` that load this rank's share of a model, with the ranks of torch.distributed."""
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def distribute(model: nn.Module) -> None:
    """Spread a model without weights (on the meta device) over the ranks of torch.distributed, as :func:`spread`."""
    kind: Any = type(model)
    config, _, mesh = kind.prepare_distribute_model(spread()["distributed_config"])
    kind.maybe_distribute_model(model, config, mesh)


def tensor_parallel(model: nn.Module) -> bool:
    """Whether the model's layers are spread over several processes."""
    return (getattr(model, "_tp_size", None) or 1) > 1


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks of a model; None: it is not tensor parallel. All ranks must make the first call, which creates them."""
    if not tensor_parallel(model):
        return None
    with _making:
        if model not in _made:
            _made[model] = Ranks(model)
        return _made[model]


class Ranks:
    """The processes that one model is spread over.

    Attributes:
        rank, size: this process's number in the group, and the number of processes in it.
        members: their global ranks.
        group: process group of the model's own collectives, on its device.
        host: gloo group of the same ranks, for numbers that the host needs.
        captures: whether the model's collectives can be part of a CUDA graph, as NCCL's can.
    """

    def __init__(self, model: nn.Module) -> None:
        mesh = model._device_mesh
        self.group = (mesh["tp"] if mesh.ndim > 1 else mesh).get_group()
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.members = dist.get_process_group_ranks(self.group)
        self.captures = self.group._get_backend(torch.device(mesh.device_type)).name() == "nccl"
        self.host = self.new_group(AGREE)

    def new_group(self, timeout: timedelta) -> dist.ProcessGroup:
        """Another group of these ranks, by gloo. All of them must call this."""
        return dist.new_group(self.members, timeout, backend="gloo", use_local_synchronization=True)

    def any(self, here: bool) -> bool:
        """Whether ``here`` is true on any rank. All of them must call it, and wait for each other."""
        return bool(self.least([-int(here)])[0])

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The element-wise minimum over all ranks. All of them must call it, and wait for each other."""
        found = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.host)
        return found.tolist()

    def gathered(self, numbers: Tensor) -> list[Tensor]:
        """``numbers`` of each rank, on the host, equally many. All of them must call it, and wait for each other."""
        found = [torch.empty_like(numbers) for _ in range(self.size)]
        dist.all_gather(found, numbers, group=self.host)
        return found

    def send(self, values: Tensor) -> None:
        """Broadcast rank 0's ``values`` on the model's device, after all work launched there."""
        dist.broadcast(values, group=self.group, group_src=0)
