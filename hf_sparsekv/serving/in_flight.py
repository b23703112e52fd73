"""One request in flight: what the engine knows of it, from its submission to the end of its answer.

It is apart from :mod:`.request`, whose types users see. All parts of the loop share this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .admission import Candidate
from .prefix import Channels, Match
from .request import Handle, Sampling
from .text import TextStream


@dataclass(eq=False)
class Request:
    """A request that was submitted, with what it holds.

    The loop's thread writes it. Only the output thread writes ``text``, ``told`` and ``shown``. Both set ``ended``.
    """

    handle: Handle
    ids: list[int]
    sampling: Sampling
    arrived: float
    blocks: int  # that prompt and longest answer take, without those of `match` and those that the index keeps
    keys: list[bytes] = field(default_factory=list)  # of the prompt's blocks, as the index knows them
    match: Match = field(default_factory=Match)
    known: tuple[int, int, int] = (-1, 0, 0)  # what the index knew of it when, see PrefixIndex.known
    channels: Channels | None = None
    text: TextStream | None = None
    order: int = 0
    row: int | None = None
    launched: int = 0  # tokens of the answer that steps were launched for
    over: bool = False  # the loop gives it no more steps
    ended: bool = False  # its end is known, and told or about to be
    begun: float = 0.0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)  # of the answer, with when the host learned of each
    times: list[float] = field(default_factory=list)
    told: int = 0  # of these, by the output thread, with this text
    shown: list[str] = field(default_factory=list)
    candidate: Candidate = field(default_factory=Candidate)
    need: int = 0  # its working set, as counted; 0: not known yet
    provisional: bool = False  # its label channels are those of a prompt that was too short to calibrate on
    roomier: int = 0  # `launched` when it got more room for copies, which fills up in the steps after that
