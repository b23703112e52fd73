"""A server of a tensor parallel model, in the processes that torchrun starts: one for each rank."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import torch

from hf_sparsekv.cli.output import CommandError, note

from ..process import leave

if TYPE_CHECKING:
    from hf_sparsekv.serving.engine import Engine

    from .server import Server

FAILED_S = 2  # how long /ready reports the loss of a rank before the replica ends


def rank() -> int:
    """This process's number among those that torchrun has started."""
    try:
        number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"]
    except (KeyError, ValueError):
        number, size = 0, 1
    if size < 2:
        raise CommandError(
            "--tensor-parallel needs a process for each GPU: torchrun --nproc-per-node 2 -m hf_sparsekv serve MODEL "
            "--tensor-parallel"
        )
    return number


def begin(place: torch.device) -> None:
    """Let the processes find each other."""
    import torch.distributed as dist

    from ..rank_processes import INTERFACES, LOOPBACK

    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]  # no other machine needs to reach them
    if alone and sys.platform == "linux":  # elsewhere the interface has another name
        for name in INTERFACES:
            os.environ.setdefault(name, LOOPBACK)
    if place.type == "cpu":
        if torch.cuda.is_available():  # where transformers would put its shares of the model
            raise CommandError("--tensor-parallel takes the GPUs that are there: leave --device out")
        dist.init_process_group("gloo")
        return
    here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if place.index is not None or here.index >= torch.cuda.device_count():
        raise CommandError(
            "--tensor-parallel takes a GPU for each process of a machine: leave --device out, and start as many "
            f"processes as GPUs (torch sees {torch.cuda.device_count()})"
        )
    torch.cuda.set_device(here)
    dist.init_process_group("nccl", device_id=here)


def watch(engine: Engine, server: Server) -> None:
    """End this process soon after the engine has failed: a rank is lost, and another replica can be started."""
    threading.Thread(target=_end_with_ranks, args=(engine, server), name="ranks", daemon=True).start()


def _end_with_ranks(engine: Engine, server: Server) -> None:
    from .server import GRACE_S

    while engine.failed is None:
        time.sleep(0.2)
    note(f"the engine has failed, and this process ends: {engine.failed}")
    time.sleep(FAILED_S)
    server.should_exit = True
    time.sleep(GRACE_S)
    leave(1)  # the engine may wait for a rank that is gone, for ever
