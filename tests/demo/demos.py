"""A model, tasks and runs for the tests of the demo."""

from __future__ import annotations

from functools import cache

import torch

from demo import documents
from demo.caches import METHODS
from demo.desk import Desk
from demo.models import PROBE, Loaded, Models
from demo.race import Session, Task
from demo.view import RaceView

LENGTH = 1024


# What a tab, a session and the models hold: tests look into it here, and nowhere else.
def tabs_of(page: Desk) -> dict:
    return page._tabs


def talks_of(session: Session) -> dict:
    return session._talks


def prefix_of(session: Session):
    return session._prefix


def read_document(session: Session, loaded: Loaded, task: Task):
    return session._prefill(loaded, task)


def makers_of(session: Session, loaded, task: Task) -> list:
    return session._makers(loaded, task)


def entries_of(models: Models) -> dict:
    return models._entries


@cache
def probe_model() -> Loaded:
    """The probe model, on the CPU."""
    return Models(torch.device("cpu")).load(PROBE)


def a_task(probe, method: str = "two_level", new_tokens: int = 12, **changes) -> Task:
    """A document with a hidden fact, and the question for it."""
    language = probe.language
    needle = language.needle(5)
    ids = documents.fit(language.document(language.bundled()), LENGTH)
    ids = documents.hide(ids, language.ids(needle.fact), 0.5)
    asked = [tuple(language.question(needle.question, first)) for first in (True, False)]
    known = METHODS[method]  # who does not look for facts has to attend to everything to find one
    values = {c.name: c.maximum if known.plain else c.value for c in known.controls}
    return Task(
        (*language.head(), *ids), *asked, method, values, **{"new_tokens": new_tokens, "go_on": True, **changes}
    )


def run(session: Session, probe, task: Task) -> tuple[RaceView, list]:
    """What the page would show at the end, and every event."""
    view, events = RaceView(), []
    with session.running():
        for event in session.race(probe, task):
            view.add(event)
            events.append(event)
    return view, events
