"""An engine over the ranks of a tensor parallel model: rank 0 decides, the others do the same (torchrun).

    with Engine(model, tokenizer, ...) as engine:  # rank 0
        ...
    follow(model, ...)  # the others, with the same arguments; until the engine is closed

Rank 0 has queue, admission, clock and sampler. What it does to rows and blocks it notes, and sends the notes, a few
hundred bytes over gloo, before it does something for which the ranks wait for each other in the model's sums: a piece
of a prompt, or a step. So what others do never depends on their own clocks or memory.

Tokens are drawn by rank 0 and given to the others on the device: their logits are the same only as far as the sums are,
bit by bit, which NCCL does not promise, and one other token would make other rows of them.

A rank that ends takes the replica with it, since the others would wait for it for ever: every two of rank 0 and another
one hold a connection, which breaks at once if a process ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ..config import OffloadConfig, SparseConfig
from ..ranks import Ranks, ranks_of
from ..row_batch import RowBatch
from .config import ServingConfig
from .garbage import set_aside
from .opening import opened
from .prefix import Channels
from .work import Work

HEAD = 4096  # bytes that every message has; longer ones send the rest behind
EVER = timedelta(days=365)  # a rank waits for the next request as long as that takes


class RanksApart(RuntimeError):
    """A rank has ended, or does something else than rank 0: the replica is over."""


class Wire:
    """Messages from rank 0 to the others, and who is still there.

    All ranks must make it. What was sent is taken in its order.

    Args:
        ranks: of the model.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._messages, self._life = ranks.new_group(EVER), ranks.new_group(EVER)
        self._others = range(1, ranks.size) if ranks.rank == 0 else (0,)
        self.closing = False  # no rank is missed any more

    def send(self, message: Any) -> None:
        """From rank 0: anything that can be pickled."""
        data = np.frombuffer(pickle.dumps(message), dtype=np.uint8)
        head = np.zeros(HEAD, dtype=np.uint8)
        head[:8] = np.frombuffer(np.int64(len(data)).tobytes(), dtype=np.uint8)
        first = data[: HEAD - 8]
        head[8 : 8 + len(first)] = first
        for part in (head, data[HEAD - 8 :].copy()):
            if len(part):
                dist.broadcast(torch.from_numpy(part), group=self._messages, group_src=0)

    def take(self) -> Any:
        """On the others: the next message. Waits for it."""
        head = torch.empty(HEAD, dtype=torch.uint8)
        dist.broadcast(head, group=self._messages, group_src=0)
        length = int(np.frombuffer(head[:8].numpy().tobytes(), dtype=np.int64)[0])
        data = head[8 : 8 + length].numpy().tobytes()
        if length > HEAD - 8:
            rest = torch.empty(length - (HEAD - 8), dtype=torch.uint8)
            dist.broadcast(rest, group=self._messages, group_src=0)
            data += rest.numpy().tobytes()
        return pickle.loads(data)

    def watch(self, lost: Callable[[RanksApart], None]) -> None:
        """Call ``lost`` if a rank ends that has not said so: of rank 0 any other one, of these rank 0."""
        for other in self._others:
            name = f"hf-sparsekv-rank-{other}"
            threading.Thread(target=self._watch, args=(other, lost), name=name, daemon=True).start()

    def _watch(self, other: int, lost: Callable[[RanksApart], None]) -> None:
        failed, cause = torch.zeros(1), None
        try:
            dist.recv(failed, group=self._life, group_src=other)
        except Exception as error:  # its process has ended
            failed, cause = torch.ones(1), error
        if failed.item() and not self.closing:
            told = RanksApart(f"rank {other} of the model has ended, and with it the replica: start it again")
            told.__cause__ = cause
            lost(told)

    def bye(self, failed: bool = False) -> None:
        """This rank ends, and says so to those that watch it; ``failed``: they have to end, too. Once."""
        if self.closing:
            return
        self.closing = True
        for other in self._others:
            with contextlib.suppress(Exception):  # it has gone before
                dist.send(torch.full((1,), float(failed)), group=self._life, group_dst=other)


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """What fails here leaves the others in the middle of it."""
    try:
        yield
    except RanksApart:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[:1] or ["no more is known"]
        raise RanksApart(
            "what all ranks of the model do together has failed, because one has ended or for want of memory, and with "
            f"it the replica: start it again ({type(error).__name__}: {first[0]})"
        ) from error


class Shared:
    """Label channels that every rank has, of its own heads; messages name them by a number.

    Args:
        number: of this one.
        here: rank 0's.
    """

    def __init__(self, number: int, here: Channels) -> None:
        self.number, self.here = number, here


class SharedWork(Work):
    """What rank 0 does, and lets the others do.

    Operations for which ranks do not wait are noted when they have been done here; those in which the model is called
    send the notes first, and so does :meth:`close`. An operation that fails here is not noted.
    """

    alone = False  # the others are in the middle of the same pass

    def __init__(self, model: torch.nn.Module, rows: RowBatch, serving: ServingConfig, wire: Wire) -> None:
        super().__init__(model, rows, serving)
        self.wire = wire
        self._notes: list[tuple[str, tuple, Any]] = []  # operation, arguments, what it gave
        self._numbers = itertools.count()
        self._forgotten: deque[int] = deque()  # channels that nobody has any more, by whatever thread
        self._waiting_for_tokens = False

    def _note(self, name: str, *args: Any, gave: Any = None) -> None:
        self._notes.append((name, args, gave))

    def _send(self, name: str, *args: Any) -> None:
        """Let the others do what was noted, and then this."""
        while self._forgotten:
            self._note("forget", self._forgotten.popleft())
        notes, self._notes = self._notes, []
        self.wire.send((notes, self.rows.cache.row_table.ids.used, name, args))

    def begin(self, ids: Sequence[int], blocks: np.ndarray, channels: Shared | None) -> None:
        super().begin(ids, blocks, channels and channels.here)
        self._note("begin", np.asarray(ids, dtype=np.int32), blocks, channels and channels.number)

    def read(self, n: int) -> bool:
        with _together():
            self._send("read", n)
            return super().read(n)

    def overtake(self, ids: Sequence[int], blocks: np.ndarray, channels: Shared | None) -> tuple[int, Tensor]:
        with _together():
            self._send("overtake", np.asarray(ids, dtype=np.int32), blocks, channels and channels.number)
            row, logits = super().overtake(ids, blocks, channels and channels.here)
        self._note("overtook", gave=row)
        return row, logits

    def give_up(self) -> None:
        super().give_up()
        self._note("give_up")

    def join(self) -> int:
        row = super().join()
        self._note("join", gave=row)
        return row

    def leave(self, row: int) -> None:
        super().leave(row)
        self._note("leave", row)

    def hold(self, row: int) -> None:
        super().hold(row)
        self._note("hold", row)

    def resume(self, row: int) -> None:
        super().resume(row)
        self._note("resume", row)

    def give(self, row: int, tokens: int) -> None:
        super().give(row, tokens)
        self._note("give", row, tokens)

    def calibrate(self, row: int, ids: Sequence[int]) -> None:
        with _together():
            self._send("calibrate", row, list(ids))
            super().calibrate(row, ids)

    def move(self, row: int, to: int) -> None:
        super().move(row, to)
        self._note("move", row, to)

    def channels(self, row: int) -> Shared:
        made = Shared(next(self._numbers), super().channels(row))
        weakref.finalize(made, self._forgotten.append, made.number)
        self._note("channels", row, made.number)
        return made

    def share(self, ids: np.ndarray) -> None:
        super().share(ids)
        self._note("share", ids)

    def drop(self, ids: np.ndarray) -> None:
        super().drop(ids)
        self._note("drop", ids)

    def step(self) -> Tensor:
        with _together():
            self._send("step")
            self._waiting_for_tokens = True  # behind a step they wait without being told
            return super().step()

    def tokens_are_there(self) -> None:
        with _together():
            if not self._waiting_for_tokens:
                self._send("take_tokens")
            self._waiting_for_tokens = False
            self.wire.ranks.send(self.tokens)

    def failed(self) -> None:
        self.wire.bye(failed=True)

    def close(self) -> None:
        if not self.wire.closing:
            with contextlib.suppress(Exception):  # a rank has ended just now
                self._send("close")
            self.wire.bye()
        super().close()


class FollowedWork(Work):
    """What the other ranks do, as rank 0 says."""

    NAMES = frozenset(
        (
            *("begin", "read", "overtake", "overtook", "give_up", "join", "leave", "hold", "resume", "give", "move"),
            *("channels", "calibrate", "forget", "share", "drop", "step", "take_tokens"),
        )
    )

    def __init__(self, model: torch.nn.Module, rows: RowBatch, serving: ServingConfig, wire: Wire) -> None:
        super().__init__(model, rows, serving)
        self.wire = wire
        self._held: dict[int, Channels] = {}
        self._row = -1

    def follow(self) -> None:
        """Do what rank 0 sends, until it closes.

        Raises:
            RanksApart: an operation has failed, or came out otherwise than there, or rank 0 has ended.
        """
        with _together():
            self._follow()

    def _follow(self) -> None:
        while True:
            notes, used, last, args = self.wire.take()
            for name, arguments, gave in notes:
                found = self._do(name, arguments)
                if gave is not None and found != gave:
                    raise RanksApart(f"{name} gave {found} here and {gave} on rank 0: start the replica again")
            if (mine := self.rows.cache.row_table.ids.used) != used:
                raise RanksApart(f"{mine} blocks are in use here and {used} on rank 0: start the replica again")
            if last == "close":
                return
            self._do(last, args)

    def _do(self, name: str, args: tuple) -> Any:
        if name not in self.NAMES:
            raise RanksApart(f"rank 0 asks for {name!r}, which is not known here: start all ranks with one version")
        return getattr(self, name)(*args)

    def begin(self, ids: np.ndarray, blocks: np.ndarray, number: int | None) -> None:
        super().begin(ids.tolist(), blocks, None if number is None else self._held[number])

    def read(self, n: int) -> bool:
        self.pace.settle()  # it keeps marks until they are over
        return super().read(n)

    def overtake(self, ids: np.ndarray, blocks: np.ndarray, number: int | None) -> None:
        self._row, _ = super().overtake(ids.tolist(), blocks, None if number is None else self._held[number])

    def overtook(self) -> int:
        """The row of the last prompt that has overtaken another one."""
        return self._row

    def give(self, row: int, tokens: int) -> None:
        """Here there may be fewer slots than on rank 0. Room says what is read over the link, not what is chosen."""
        super().give(row, min(tokens, self.rows.room(row) + self.rows.free_slots))

    def channels(self, row: int, number: int) -> None:
        self._held[number] = super().channels(row)

    def forget(self, number: int) -> None:
        """No prompt will begin with these channels."""
        del self._held[number]

    def step(self) -> None:
        super().step()
        self.take_tokens()

    def take_tokens(self) -> None:
        """Rank 0's tokens, on the device."""
        self.wire.ranks.send(self.tokens)

    def close(self) -> None:
        if self.reading is not None:
            self.give_up()
        super().close()


@torch.no_grad()
def follow(
    model: PreTrainedModel,
    config: SparseConfig | str | None = None,
    offload: OffloadConfig | bool | None = None,
    serving: ServingConfig | None = None,
    lost: Callable[[RanksApart], None] | None = None,
) -> None:
    """On all ranks but 0 of a tensor parallel model: work for the engine of rank 0 until it is closed.

    Args:
        model, config, offload, serving: as rank 0's engine gets them.
        lost: is called in a thread of its own if rank 0 has ended or failed. This one may wait for it in the middle of
            a pass, for ever, so ``lost`` has to end the process. None: say so on stderr, and end it with exit code 1.

    Raises:
        TypeError, ValueError: as :class:`.Engine`.
        RanksApart: as :meth:`FollowedWork.follow`. The replica is over.
    """
    ranks = ranks_of(model)
    if ranks is None or ranks.rank == 0:
        raise ValueError("follow() is for ranks 1, 2, ... of a tensor parallel model: make an Engine here")
    with contextlib.ExitStack() as stack:
        made = opened(model, config, offload, serving, stack)
        stack.enter_context(set_aside())
        wire = Wire(ranks)
        work = FollowedWork(model, made.rows, made.serving, wire)
        stack.callback(work.segments.close)
        wire.watch(_end_process if lost is None else lost)
        device = torch.cuda.device(work.device) if work.device.type == "cuda" else contextlib.nullcontext()
        try:
            with device:
                work.follow()
        except BaseException:
            wire.bye(failed=True)
            raise
        wire.bye()
        work.close()


def _end_process(error: RanksApart) -> None:
    print(f"hf-sparsekv: {error}", file=sys.stderr, flush=True)
    os._exit(1)  # the main thread may wait in a collective, which nothing else ends
