"""Answers that follow a grammar: which tokens may come next, by ``llguidance`` (the extra ``structured``).

Grammars are compiled and followed in processes of their own (:mod:`.grammar_worker`), so that none takes the engine's
time and memory. A step's logits are computed while the host reads the token before. So a grammar delays a step only if
its mask takes longer than these logits. :mod:`.drawn` knows tokens in flight and no grammar.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from . import grammar_worker
from .logit_edits import WORD, Allowed
from .request import Busy, Closed, NotFollowed
from .sampling import Sampling
from .token_bytes import token_bytes

KEPT, KEPT_BYTES = 64, 256 << 20  # compiled grammars
COMPILING, MOST_COMPILING = 2, 32  # at a time; requests that wait for it, also for the same grammar
REFUSED, REFUSED_S = (
    1024,
    60,
)  # refusals that are remembered; seconds, as running out of memory may be no grammar's fault
MOST_BYTES = 1 << 30  # of all grammars, also those that only requests still have
PROCESS = 4 << 20  # bytes of a process without its grammar
WAIT_S = 30  # seconds; never reached: workers count their own time, by the CPU's clock
TOO_MUCH = (
    f"llguidance takes more than {grammar_worker.COMPILE_S:g} s to compile it, {grammar_worker.MASK_S:g} s for a token "
    f"or {grammar_worker.MEMORY >> 20} MiB. Smaller numbers, shorter patterns and fewer alternatives help"
)
MISSING = "needs llguidance: install the extra `structured`, or `pip install llguidance`"
# As people and models write it: a space, or lines that are indented. No more, or an answer may be nothing else.
WHITESPACE = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,64})?"}


class Worker:
    """The other end of a process of :mod:`.grammar_worker`; it ends when this is closed or forgotten.

    Args:
        parent: the process that forks it; None: it has begun.
    """

    def __init__(self, connection: Connection, parent: Worker | None = None) -> None:
        self.connection = connection
        self.size = 0  # bytes that its grammar takes
        self._parent = parent

    def fork(self) -> Worker:
        """A process that begins as this one is now; if this one has ended, the new one has, too."""
        ours, theirs = _pipe()
        with theirs, contextlib.suppress(OSError, RuntimeError):  # this one has ended; macOS tells so by the second
            self.connection.send_bytes(grammar_worker.FORK)
            reduction.send_handle(self.connection, theirs.fileno(), None)
        return Worker(ours, self)

    def begun(self) -> None:
        """Wait until it has begun.

        Raises:
            EOFError: it has not: the process that was to fork it has ended, or cannot.
        """
        parent, self._parent = self._parent, None
        if parent is not None:
            try:
                self._received()
            except EOFError:
                parent.connection.close()
                raise

    def ask(self, message: bytes) -> None:
        """Send a message; if the process has ended, :meth:`answer` reports it."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def answer(self) -> tuple[bytes, bool]:
        """An answer, and whether it is none but an error.

        Raises:
            EOFError: the process has ended, as what it was asked takes too much time or memory.
        """
        self.begun()
        answer = self._received()
        return answer[:-1], answer[-1:] == grammar_worker.WRONG

    def end(self) -> None:
        """End the process, also while another thread waits for its answer."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)

    def _received(self) -> bytes:
        try:
            return self.connection.recv_bytes()
        except (OSError, EOFError):
            self.connection.close()
            raise EOFError from None


def _pipe() -> tuple[Connection, Connection]:
    """Both ends of a connection; reading at the first one takes no longer than ``WAIT_S``."""
    ours, theirs = Pipe()
    with socket.socket(fileno=os.dup(ours.fileno())) as same:  # a selector takes longer than the mask
        same.setblocking(True)  # Python's default timeout may have made both non-blocking
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", WAIT_S, 0))
    return ours, theirs


class Constraint:
    """The grammar of one answer, and how far the answer has come.

    Args:
        compiled: the process that has compiled the grammar.
        end: int32 words of the mask that allows ends alone.

    Attributes:
        unread: tokens in flight that follow, as callables that wait for them.
        error: why the grammar cannot be followed any further; the answer may only end then.
    """

    def __init__(self, compiled: Worker, end: Tensor) -> None:
        self._compiled, self._end = compiled, end
        self._worker: Worker | None = None
        self.unread: list[Any] = []
        self.error: NotFollowed | Busy | None = None

    def close(self) -> None:
        """End the process of this answer, which needs no more masks."""
        self.unread = []  # they keep the records of other answers, and those keep this
        if self._worker is not None:
            self._worker.connection.close()

    def ask(self) -> None:
        """Ask for the mask of the next token. It waits for the tokens before it."""
        tokens, self.unread = [token() for token in self.unread], []
        if self.error is not None:
            return
        if self._worker is None:
            try:
                self._worker = self._compiled.fork()
            except OSError as error:
                self.error = Busy(f"the machine starts no process for this grammar: {error}")
                return
        self._worker.ask(grammar_worker.MASK + array("i", tokens).tobytes())

    def fill(self, words: Tensor) -> None:
        """Write the mask that was asked for, int32 ``[words]`` on the host; after an error only the end."""
        if self.error is None:
            self.error = self._filled(words)
        if self.error is not None:
            words.copy_(self._end)

    def _filled(self, words: Tensor) -> NotFollowed | Busy | None:
        try:
            self._worker.begun()
        except EOFError:  # the machine's memory, or its operator
            return Busy("the process of this grammar has ended: ask again")
        try:
            answer, wrong = self._worker.answer()
        except EOFError:
            return NotFollowed(f"the grammar is too large for a step: {TOO_MUCH}")
        if wrong:
            return NotFollowed(f"the grammar is too large for a step: {_first(answer)}")
        words.copy_(torch.frombuffer(bytearray(answer), dtype=torch.int32))
        return None


class Grammars:
    """Compiles grammars for one tokenizer, in processes of their own; any thread may.

    Args:
        tokenizer: of the model; None: there is none, and no grammar.
        vocabulary: logits of a row.
        eos: tokens that end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, eos: Iterable[int]) -> None:
        self._tokenizer, self._vocabulary, self._eos = tokenizer, vocabulary, sorted(eos)
        self._end = torch.zeros(-(-vocabulary // WORD), dtype=torch.int32)
        for token in self._eos:
            if token < vocabulary:
                self._end.numpy().view(np.uint32)[token // WORD] |= np.uint32(1 << token % WORD)
        self._few = threading.Semaphore(COMPILING)
        # Processes inherit a thread's priority. A server's submitting threads have a low one, and masks must not.
        self._starter = ThreadPoolExecutor(1, "hf-sparsekv-grammars")
        self._starter.submit(int)  # or it starts with the first task, from the thread that submits it
        self._lock = threading.Lock()  # guards the attributes below
        self._root: Worker | None = None  # has the tokenizer
        self._program: subprocess.Popen | None = None
        self._compiled: OrderedDict[tuple[bytes, str], Worker] = OrderedDict()
        self._compiling: dict[tuple[bytes, str], Future[Worker]] = {}
        self._waiting = 0  # requests
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()  # when and why, by a hash
        self._closed = False
        self._all: WeakSet[Worker] = WeakSet()  # also those of waiting requests

    def constraint(self, sampling: Sampling) -> Constraint | None:
        """The constraint on a request's answer; None: there is none.

        Raises:
            ValueError: the schema or the grammar cannot be followed; llguidance or a tokenizer is missing.
            Busy: many grammars are compiled just now, or those of waiting and running requests take much memory.
            Closed: after :meth:`close`.
            RuntimeError: the machine starts no process.
        """
        if sampling.json_schema is None and sampling.grammar is None:
            return None
        name = "grammar" if sampling.json_schema is None else "json_schema"
        if os.name != "posix":
            raise ValueError(f"{name} needs Linux or macOS")
        if self._tokenizer is None:
            raise ValueError(f"{name} needs a tokenizer: give the engine one")
        if importlib.util.find_spec("llguidance") is None:
            raise ValueError(f"{name} {MISSING}")
        if sampling.json_schema is None:
            key = grammar_worker.LARK, sampling.grammar
        else:
            key = grammar_worker.SCHEMA, sampling.json_schema
        return Constraint(self._worker(name, key), self._end)

    def _worker(self, name: str, key: tuple[bytes, str]) -> Worker:
        """The process that has compiled a grammar; requests with the same one wait for the first of them."""
        mine: Future[Worker] | None = None
        with self._lock:
            self._check_open()
            if key in self._compiled and not self._compiled[key].connection.closed:
                self._compiled.move_to_end(key)
                return self._compiled[key]
            when, why = self._refused.get(_hash(key), (0.0, ""))
            if why and time.monotonic() - when < REFUSED_S:
                raise ValueError(why)
            if self._waiting >= MOST_COMPILING:
                raise Busy(f"{MOST_COMPILING} requests wait for schemas and grammars already, which is as many as may")
            found = self._compiling.get(key)
            if found is None:
                if sum(one.size for one in self._all) > MOST_BYTES:
                    raise Busy("the grammars of requests that wait or run take too much memory already")
                found = mine = self._compiling[key] = Future()
            self._waiting += 1
        try:
            if mine is not None:
                try:
                    mine.set_result(self._made(name, key))
                except BaseException as error:
                    mine.set_exception(error)
            return found.result()
        finally:
            with self._lock:
                self._waiting -= 1
                if mine is not None:
                    del self._compiling[key]
            del mine, found  # they keep the error, and its traceback keeps this frame and the process

    def _made(self, name: str, key: tuple[bytes, str]) -> Worker:
        kind, text = key
        with self._few:
            made = self._forked()
            made.ask(kind + text.encode())
            try:
                answer, wrong = made.answer()
                why = _first(answer)
            except EOFError:
                why, wrong = TOO_MUCH, True
        with self._lock:
            self._check_open()
            if wrong:
                made.connection.close()
                why = f"{name} cannot be followed: {why}"
                self._refused[_hash(key)] = time.monotonic(), why
                while len(self._refused) > REFUSED:
                    self._refused.popitem(last=False)
                raise ValueError(why)
            made.size = PROCESS + int(answer)
            self._compiled[key] = made
            while len(self._compiled) > KEPT or sum(one.size for one in self._compiled.values()) > KEPT_BYTES:
                self._compiled.popitem(last=False)
        return made

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the engine takes no requests: it is closed")

    def _forked(self) -> Worker:
        """A process that has the tokenizer."""
        for _ in range(2):
            with self._lock:
                self._check_open()
                try:
                    if self._root is None:
                        self._root = self._starter.submit(self._started).result()
                    made = self._root.fork()
                    self._all.add(made)
                    made.begun()
                    return made
                except EOFError:  # something has ended it
                    self._end_program()
                except OSError as error:
                    raise RuntimeError(f"the machine starts no process for a grammar: {error}") from error
        raise RuntimeError("the machine starts no process for a grammar")

    def _started(self) -> Worker:
        if not self._eos:
            raise ValueError("json_schema and grammar need a token that ends an answer, and this model has none")
        tokens, special = token_bytes(self._tokenizer, self._vocabulary)
        ours, theirs = _pipe()
        with theirs:
            # Isolated, or this folder would be on the path, whose `http` is not Python's.
            start = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
            self._program = subprocess.Popen(
                [sys.executable, "-I", "-c", start, grammar_worker.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,
            )
        text = self._tokenizer.backend_tokenizer.to_str()
        given = {"tokenizer": text, "tokens": tokens, "special": special, "eos": self._eos, "schemas": WHITESPACE}
        try:
            ours.send({"path": sys.path, **given})
            error = ours.recv()
        except (OSError, EOFError):
            error = "it has ended"
        if error is not None:
            self._end_program()
            raise ValueError(f"json_schema and grammar need a process of llguidance, which fails: {error}")
        return Worker(ours)

    def _end_program(self) -> None:
        if self._root is not None:
            self._root.connection.close()
        if self._program is not None:
            self._program.kill()  # it holds nothing: its children go on
            self._program.wait()
        self._root = self._program = None

    def close(self) -> None:
        """End the processes. Answers that are not whole get an error."""
        with self._lock:
            self._closed = True
            for one in self._all:
                one.end()
            self._compiled.clear()
            self._end_program()
        self._starter.shutdown()

    def allowed(
        self,
        constraints: Mapping[int, Constraint],
        device: torch.device,
        fixed: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> Allowed | None:
        """Masks of a batch by the places that have a grammar; it waits for their last tokens. None: there are none.

        ``fixed``: masks of other places, int32 ``[words]`` on the host.
        """
        if not constraints and not fixed:
            return None
        pinned, count = device.type == "cuda", len(constraints) + len(fixed)
        words = torch.empty(count, -(-self._vocabulary // WORD), dtype=torch.int32, pin_memory=pinned)
        for constraint in constraints.values():  # they compute side by side
            constraint.ask()
        for row, constraint in zip(words, constraints.values()):
            constraint.fill(row)
        for row, mask in zip(words[len(constraints) :], fixed.values()):
            row.copy_(mask)
        places = torch.tensor([*constraints, *fixed], pin_memory=pinned)
        return Allowed(places.to(device, non_blocking=True), words.to(device, non_blocking=True))


def _hash(key: tuple[bytes, str]) -> bytes:
    return hashlib.sha256(key[0] + key[1].encode()).digest()


def _first(error: bytes) -> str:
    """The first line of an error; the others show the text so far, which is the client's own."""
    return error.decode(errors="replace").strip().split("\n")[0].split(" <state>")[0]
