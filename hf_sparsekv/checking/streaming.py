"""Streamers of checked texts: parts of a text, and drafts that are shown before full attention has looked at them."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer


class Unended(BaseStreamer):
    """A streamer for one of several parts of a text: its end is not the text's."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer

    def put(self, value: Tensor) -> None:
        self._streamer.put(value)

    def end(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:  # what the loop looks for on a streamer
        return getattr(self._streamer, name)


class Early:
    """Shows drafts at once, and takes back those that do not stay.

    Args:
        streamer: with a method ``take_back(tokens)``, which is told how many of its latest tokens are no more.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._shown: deque[Tensor] = deque()  # drafts of the round under way

    def draft(self, token: Tensor) -> None:
        """Show the next draft, ``[batch]``."""
        self._shown.append(token)
        self._streamer.put(token)

    def put(self, token: Tensor) -> None:
        """The next token of the text is this one."""
        if self._shown and torch.equal(self._shown[0], token):
            self._shown.popleft()
            return
        self.take_back()
        self._streamer.put(token)

    def take_back(self) -> None:
        """The drafts that are left are no part of the text."""
        if self._shown:
            self._streamer.take_back(len(self._shown))
            self._shown.clear()
