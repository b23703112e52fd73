"""The engine's record of one request, from its submission to the end of its answer.

The types that users see are in :mod:`.request`. All parts of the loop share this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .admission import Candidate
from .grammar import Constraint
from .prefix import Channels, Match
from .request import Handle, Logprob
from .sampling import Sampling
from .text import TextStream

MOST = 7  # drafts of an exact request: with the token before them they fill the second graph of verifications


@dataclass(eq=False)
class Request:
    """A submitted request and its resources.

    The loop's thread writes it. Only the output thread writes ``text``, ``told`` and ``shown``. Both set ``ended``.
    """

    handle: Handle
    ids: list[int]
    sampling: Sampling
    arrived: float
    blocks: int  # for prompt and longest answer, without those of `match` and those that the index keeps
    keys: list[bytes] = field(default_factory=list)  # index keys of the prompt's blocks
    match: Match = field(default_factory=Match)
    known: tuple[int, int, int] = (-1, 0, 0)  # `changes` of the index, and its PrefixIndex.known at that time
    channels: Channels | None = None
    held: tuple[int, Any] | None = None  # tokens of its prompt, and the snapshot of windows and states after them
    text: TextStream | None = None
    constraint: Constraint | None = None  # the grammar that the answer follows
    exact: bool = False  # its tokens are those of full attention
    order: int = 0
    row: int | None = None
    launched: int = 0  # tokens of the answer whose steps were launched
    over: bool = False  # the loop gives it no more steps
    ended: bool = False  # its end is known; the handle knows it or will soon
    begun: float = 0.0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)  # of the answer
    times: list[float] = field(default_factory=list)  # when the host received each token
    logprobs: list[Logprob] = field(default_factory=list)  # of each token, if they are asked for
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # of the prompt's tokens, likewise
    told: int = 0  # tokens that the output thread has delivered
    shown: list[str] = field(default_factory=list)  # text that the output thread has delivered
    candidate: Candidate = field(default_factory=Candidate)
    need: int = 0  # its measured working set; 0: not known yet
    provisional: bool = False  # its prompt was too short to calibrate its label channels on
    roomier: int = 0  # `launched` when it last got more room for copies, which the next steps fill
