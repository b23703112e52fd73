"""An engine over the ranks of a tensor parallel model: rank 0 decides, and the others follow (torchrun).

    with TensorParallelEngine(model, tokenizer, ...) as engine:  # rank 0
        ...
    follow(model, ...)  # the others, with the same arguments; until the engine is closed

Rank 0 has the queue, admission, clock and sampler. It records its operations on rows and blocks, and sends the records,
a few hundred bytes, over gloo. It does so before each call of the model (a piece of a prompt, or a step), in which the
ranks wait for each other's all-reduce. So the other ranks never depend on their own clocks or memory.

Rank 0 draws the tokens and broadcasts them on the device. The ranks' logits are equal only if the all-reduce is bitwise
equal, which NCCL does not promise. A single different token would make the rows differ.

If a rank ends, the replica ends, because the others would wait for it forever. Rank 0 has a connection to every other
rank, which breaks at once if a process ends.
"""

from __future__ import annotations

import contextlib
import itertools
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

from hf_sparsekv.ranks import Ranks, ranks_of
from hf_sparsekv.row_batch import RowBatch
from hf_sparsekv.serving.engine import Engine
from hf_sparsekv.serving.opening import opened
from hf_sparsekv.serving.prefix import Channels
from hf_sparsekv.serving.work import Work
from hf_sparsekv_config.serving import ServingConfig
from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from .process import leave, set_aside

HEAD = 4096  # bytes of a message's first part; a second part has the rest of longer ones
EVER = timedelta(days=365)  # timeout of a rank that waits for the next request


class RanksApart(RuntimeError):
    """A rank has ended, or has diverged from rank 0: the replica has to end."""


class Wire:
    """Sends messages from rank 0 to the others, in order, and detects ranks that have ended.

    All ranks must create it.

    Args:
        model: a tensor parallel model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        ranks = ranks_of(model)
        assert ranks is not None, "only a tensor parallel model has a wire"
        self.ranks = ranks
        self._messages, self._life = ranks.new_group(EVER), ranks.new_group(EVER)
        self._others = range(1, ranks.size) if ranks.rank == 0 else (0,)
        self.closing = False  # from here on ranks may end

    def send(self, message: Any) -> None:
        """Send a message from rank 0: anything that can be pickled."""
        data = np.frombuffer(pickle.dumps(message), dtype=np.uint8)
        head = np.zeros(HEAD, dtype=np.uint8)
        head[:8] = np.frombuffer(np.int64(len(data)).tobytes(), dtype=np.uint8)
        first = data[: HEAD - 8]
        head[8 : 8 + len(first)] = first
        for part in (head, data[HEAD - 8 :].copy()):
            if len(part):
                dist.broadcast(torch.from_numpy(part), group=self._messages, group_src=0)

    def take(self) -> Any:
        """Wait for the next message, on the other ranks."""
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
        """Call ``lost`` if a rank ends without :meth:`bye`. Rank 0 watches all others, and they watch rank 0."""
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
        """Tell the watching ranks that this one ends; ``failed``: they have to end, too. A second call does nothing."""
        if self.closing:
            return
        self.closing = True
        for other in self._others:
            with contextlib.suppress(Exception):  # it has gone before
                dist.send(torch.full((1,), float(failed)), group=self._life, group_dst=other)


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Inside, turn errors into :class:`RanksApart`: they leave the other ranks in the middle of an operation."""
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
    """Label channels. Every rank keeps those of its own heads, and messages refer to them by a number.

    Args:
        number: the number in messages.
        here: rank 0's channels.
    """

    def __init__(self, number: int, here: Channels) -> None:
        self.number, self.here = number, here


def _of_all_heads(tables: dict[int, Tensor], ranks: Ranks) -> dict[int, Tensor]:
    """Tables of audits by layer, with the rows of all ranks' query heads."""
    return {layer: torch.cat(ranks.gathered(table)) for layer, table in tables.items()}


class SharedWork(Work):
    """Rank 0's operations, which the other ranks repeat.

    Operations without collectives are recorded after they have succeeded here. Operations that call the model send the
    records first, and so does :meth:`close`.
    """

    alone = False  # the other ranks are in the middle of the same pass
    keeps_snapshots = False  # they stay on their rank

    @staticmethod
    def check(model: torch.nn.Module) -> None:
        """Raise ValueError unless this is rank 0 of the model."""
        ranks = ranks_of(model)
        if ranks is None:
            raise ValueError("this model is in one process: call hf_sparsekv.Engine()")
        if ranks.rank != 0:
            raise ValueError(f"this is rank {ranks.rank} of the model, whose engine is on rank 0: call follow() here")

    def __init__(self, model: torch.nn.Module, rows: RowBatch, serving: ServingConfig) -> None:
        self.wire = Wire(model)
        super().__init__(model, rows, serving)
        self._notes: list[tuple[str, tuple, Any]] = []  # operation, arguments, result
        self._numbers = itertools.count()
        self._forgotten: deque[int] = deque()  # numbers of channels without references; any thread appends
        self._waiting_for_tokens = False

    def _note(self, name: str, *args: Any, gave: Any = None) -> None:
        self._notes.append((name, args, gave))

    def _send(self, name: str, *args: Any) -> None:
        """Let the others repeat the recorded operations, and then this one."""
        while self._forgotten:
            self._note("forget", self._forgotten.popleft())
        notes, self._notes = self._notes, []
        self.wire.send((notes, self.rows.cache.row_table.ids.used, name, args))

    def begin(self, ids: Sequence[int], blocks: np.ndarray, channels: Shared | None, told: int | None = None) -> None:
        super().begin(ids, blocks, channels and channels.here, told)
        self._note("begin", np.asarray(ids, dtype=np.int32), blocks, channels and channels.number, told)

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

    def audits(self) -> dict[int, Tensor]:
        with _together():
            self._send("audits")
            return _of_all_heads(super().audits(), self.wire.ranks)

    def step(self) -> Tensor:
        with _together():
            self._send("step")
            self._waiting_for_tokens = True  # after a step they wait for tokens without a message
            return super().step()

    def tokens_are_there(self) -> None:
        with _together():
            if not self._waiting_for_tokens:
                self._send("take_tokens")
            self._waiting_for_tokens = False
            self.wire.ranks.send(self.tokens)

    def watch(self, lost: Callable[[RuntimeError], None]) -> None:
        self.wire.watch(lost)

    def failed(self) -> None:
        self.wire.bye(failed=True)

    def close(self) -> None:
        if not self.wire.closing:
            with contextlib.suppress(Exception):  # a rank has ended just now
                self._send("close")
            self.wire.bye()
        super().close()


class FollowedWork(Work):
    """The operations of the other ranks, which repeat those of rank 0."""

    keeps_snapshots = False
    NAMES = frozenset(
        (
            *("begin", "read", "overtake", "overtook", "give_up", "join", "leave", "hold", "resume", "give", "move"),
            *("channels", "calibrate", "forget", "share", "drop", "step", "take_tokens", "audits"),
        )
    )

    @staticmethod
    def check(model: torch.nn.Module) -> None:
        """Raise ValueError unless this is another rank than 0."""
        ranks = ranks_of(model)
        if ranks is None or ranks.rank == 0:
            raise ValueError("follow() is for ranks 1, 2, ... of a tensor parallel model: make an engine here")

    def __init__(self, model: torch.nn.Module, rows: RowBatch, serving: ServingConfig) -> None:
        self.wire = Wire(model)
        super().__init__(model, rows, serving)
        self._held: dict[int, Channels] = {}
        self._row = -1

    def follow(self) -> None:
        """Repeat rank 0's operations, until it closes.

        Raises:
            RanksApart: an operation failed or had another result than on rank 0, or rank 0 has ended.
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

    def begin(self, ids: np.ndarray, blocks: np.ndarray, number: int | None, told: int | None = None) -> None:
        super().begin(ids.tolist(), blocks, None if number is None else self._held[number], told)

    def read(self, n: int) -> bool:
        self.pace.settle()  # it keeps marks until they are over
        return super().read(n)

    def overtake(self, ids: np.ndarray, blocks: np.ndarray, number: int | None) -> None:
        self._row, _ = super().overtake(ids.tolist(), blocks, None if number is None else self._held[number])

    def overtook(self) -> int:
        """The row of the last prompt that overtook another one."""
        return self._row

    def give(self, row: int, tokens: int) -> None:
        """Give at most the free slots, which may be fewer than on rank 0. This never changes what is selected."""
        super().give(row, min(tokens, self.rows.room(row) + self.rows.free_slots))

    def channels(self, row: int, number: int) -> None:
        self._held[number] = super().channels(row)

    def forget(self, number: int) -> None:
        """Drop channels with which no prompt will begin."""
        del self._held[number]

    def audits(self) -> dict[int, Tensor]:
        """Give rank 0 what sparse prompts have covered in the heads here."""
        return _of_all_heads(super().audits(), self.wire.ranks)

    def step(self) -> None:
        super().step()
        self.take_tokens()

    def take_tokens(self) -> None:
        """Receive rank 0's tokens on the device."""
        self.wire.ranks.send(self.tokens)

    def close(self) -> None:
        if self.reading is not None:
            self.give_up()
        super().close()


class TensorParallelEngine(Engine):
    """An engine on rank 0 of a tensor parallel model. The other ranks call :func:`follow` with the same arguments."""

    _work_type = SharedWork


@torch.no_grad()
def follow(
    model: PreTrainedModel,
    config: SparseConfig | str | None = None,
    offload: OffloadConfig | bool | None = None,
    serving: ServingConfig | None = None,
    lost: Callable[[RanksApart], None] | None = None,
) -> None:
    """Work for the engine of rank 0 until it is closed, on any other rank of a tensor parallel model.

    Args:
        model, config, offload, serving: the same arguments as those of rank 0's engine.
        lost: called on a thread of its own if rank 0 has ended or failed. It has to end the process, because the
            calling thread may wait for rank 0 forever. None: print the error and exit with code 1.

    Raises:
        TypeError, ValueError: as :class:`.Engine`.
        RanksApart: as :meth:`FollowedWork.follow`. The replica has to end.
    """
    FollowedWork.check(model)
    with contextlib.ExitStack() as stack:
        made = opened(model, config, offload, serving, stack)
        stack.enter_context(set_aside())
        work = FollowedWork(model, made.rows, made.serving)
        wire = work.wire
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
    print(f"hf-sparsekv: {error}", file=sys.stderr)
    leave(1)  # the main thread may wait in a collective, which nothing else ends
