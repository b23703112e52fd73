"""The ranks of a tensor parallel model: how one is loaded, who they are, and what all of them have to decide alike.

transformers spreads a model's layers over processes (``tp_plan="auto"``, torchrun). Every rank runs the same forward
pass on its share of the heads, and waits in each layer for the sums of all. So a rank must run a pass when the others
do, or all of them wait for ever; what decides about that, and may differ from rank to rank, is agreed on here, on the
host, by gloo.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

AGREE = timedelta(minutes=10)  # that a rank waits for the others: one that compiles kernels may be behind

_made: weakref.WeakKeyDictionary[nn.Module, Ranks] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def spread() -> dict:
    """What ``from_pretrained`` takes to load this rank's share of a model, of the ranks of torch.distributed."""
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def tensor_parallel(model: nn.Module) -> bool:
    """Whether the model's layers are spread over several processes."""
    return (getattr(model, "_tp_size", None) or 1) > 1


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks of a tensor parallel model, made at the first call, which all ranks must make; None: it is not."""
    if not tensor_parallel(model):
        return None
    with _making:
        if model not in _made:
            _made[model] = Ranks(model)
        return _made[model]


class Ranks:
    """The processes that one model is spread over.

    Attributes:
        rank, size: this one's number among them, and how many they are.
        members: their numbers among all processes.
        group: of the model's own collectives, on its device.
        host: the same ranks by gloo, for numbers that the host needs.
        captures: the model's collectives can be part of a CUDA graph: they are NCCL's.
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
        """Whether it is so on any rank. All of them must ask, and wait for each other."""
        return bool(self.least([-int(here)])[0])

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of all ranks, number by number. All of them must ask, and wait for each other."""
        found = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.host)
        return found.tolist()

    def send(self, values: Tensor) -> None:
        """Give all ranks what rank 0 has in ``values``, on the model's device and behind what was launched there."""
        dist.broadcast(values, group=self.group, group_src=0)
