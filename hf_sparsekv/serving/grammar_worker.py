"""The program that compiles grammars and computes masks, in processes that the engine can lose.

A schema of 50 bytes may ask llguidance for minutes and gigabytes, and running out of memory ends its process. Its own
limits count work that takes 0.1 to 40 microseconds a unit, and not that of `multipleOf` and `allOf`. So the kernel
limits time and memory here. It is a program: it imports nothing of this package, and no torch.

One process has the tokenizer. It forks one for each grammar, and that one, once it has compiled, one for each answer.
Every process serves one connection until its other end is closed:

- ``fork`` and a file descriptor: a child serves the connection of this descriptor, and says there that it does;
- ``schema`` or ``lark``, and a grammar: it is compiled; the answer is the bytes that it takes, or an error;
- ``mask`` and tokens: they are appended to the answer, and the mask of the next token follows, or an error.
"""

from __future__ import annotations

import array
import ctypes
import gc
import os
import signal
import sys
import time
from multiprocessing import reduction
from multiprocessing.connection import Connection

FORK, SCHEMA, LARK, MASK = b"f", b"s", b"l", b"m"
RIGHT, WRONG = b"\0", b"\1"  # last byte of an answer
PR_SET_CHILD_SUBREAPER = 36

COMPILE_S = 0.5  # seconds of CPU for compiling and the first mask
MASK_S = 0.25  # for one mask
ANSWER_S, TOKEN_S = 1.0, 0.02  # for all masks of an answer, and more for each; honest ones take 0.02 to 7 ms
MEMORY = 128 << 20  # bytes of address space that a grammar, and then an answer, may add


class Tokens:
    """A tokenizer as llguidance takes one."""

    def __init__(self, tokenizer, tokens: list[bytes], special: list[int], eos: int) -> None:
        self._tokenizer = tokenizer
        self.tokens, self.special_token_ids = tokens, special
        self.eos_token_id, self.bos_token_id = eos, None

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text is a string")  # llguidance tries both
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class Worker:
    """Serves one connection.

    Args:
        tokens: llguidance's view of the tokenizer.
        words: int32 words of a mask.
        schemas: how llguidance reads JSON schemas.
    """

    def __init__(self, connection: Connection, tokens, words: int, schemas: dict) -> None:
        self._connection, self._tokens, self._schemas = connection, tokens, schemas
        self._mask = bytearray(4 * words)
        self._matcher = None
        self._left = ANSWER_S

    def serve(self) -> None:
        """Do what is asked until the other end is closed."""
        while True:
            try:
                message = self._connection.recv_bytes()
                kind, rest = message[:1], message[1:]
                if kind == FORK:
                    self._fork()
                else:
                    self._connection.send_bytes(
                        self._next(rest) if kind == MASK else self._compile(kind, rest.decode())
                    )
            except (EOFError, ConnectionError):
                return

    def _fork(self) -> None:
        given = reduction.recv_handle(self._connection)
        try:
            child = os.fork() == 0
        except OSError:  # the other end finds this one closed
            child = False
        if not child:
            os.close(given)
            return
        self._connection.close()
        self._connection = Connection(given)
        _limit_memory()
        self._connection.send_bytes(RIGHT)

    def _compile(self, kind: bytes, text: str) -> bytes:
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark  # of quadratic time

        before = _resident()
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S)
        try:
            if kind == LARK:
                grammar = LLMatcher.grammar_from_lark(any_to_lark(text))
            else:
                grammar = LLMatcher.grammar_from_json_schema(text, defaults=self._schemas)
        except Exception as error:  # nested too deeply, or no grammar; an exception of GBNF has no better type
            return str(error).encode() + WRONG
        self._matcher = LLMatcher(self._tokens, grammar, log_level=0)
        answer = self._filled()  # its answers begin with what this has computed
        signal.setitimer(signal.ITIMER_PROF, 0)
        return answer if answer[-1:] == WRONG else b"%d" % (_resident() - before) + RIGHT

    def _next(self, tokens: bytes) -> bytes:
        began = time.process_time()
        self._left += TOKEN_S
        signal.setitimer(signal.ITIMER_PROF, max(1e-3, min(MASK_S, self._left)))
        for token in array.array("i", tokens):
            if not self._matcher.is_stopped():  # a row may run a step too many
                self._matcher.consume_token(token)
        answer = self._filled()
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._left -= time.process_time() - began
        return answer

    def _filled(self) -> bytes:
        """The mask, or why there is none."""
        address = (ctypes.c_char * len(self._mask)).from_buffer(self._mask)
        self._matcher.unsafe_compute_mask_ptr(ctypes.addressof(address), len(self._mask))
        if self._matcher.is_error():
            return self._matcher.get_error().encode() + WRONG
        return bytes(self._mask) + RIGHT


def _statm(place: int) -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[place]) * os.sysconf("SC_PAGE_SIZE")


def _resident() -> int:
    """Bytes in memory; 0 where the system does not tell."""
    try:
        return _statm(1)
    except OSError:
        return 0


def _limit_memory() -> None:
    import resource  # not on Windows, where the constants above are read

    try:
        now = _statm(0)
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """Serve the connection whose file descriptor is the last argument."""
    import resource

    # The engine decides about the end. SIGPROF, of the timers, ends the process, whatever was inherited.
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(one, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    if sys.platform == "linux":  # answers outlive grammars; a server that is process 1 would have to wait for them
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:  # if the machine runs out of memory, these processes go first
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
    connection = Connection(int(sys.argv[-1]))
    try:
        worker = _with_tokenizer(connection, connection.recv())
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    gc.collect()
    gc.freeze()  # forks take as long as there is memory, and collecting would copy it
    connection.send(None)
    try:
        worker.serve()
    finally:
        os._exit(0)  # the parent's cleanup is not its children's


def _with_tokenizer(connection: Connection, given: dict) -> Worker:
    sys.path[:] = given["path"]
    from llguidance import LLTokenizer, TokenizerWrapper
    from tokenizers import Tokenizer

    vocabulary = len(given["tokens"])
    view = Tokens(Tokenizer.from_str(given["tokenizer"]), given["tokens"], given["special"], given["eos"][0])
    tokens = LLTokenizer(TokenizerWrapper(view), n_vocab=vocabulary, eos_token=given["eos"])
    view.tokens = []  # it has them
    return Worker(connection, tokens, -(-vocabulary // 32), given["schemas"])


if __name__ == "__main__":
    main()
