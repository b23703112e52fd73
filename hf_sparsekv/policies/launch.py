"""How a captured step runs what a policy does beside the attention, and after it.

Only the capture reads it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """How one layer's hooks are launched.

    Args:
        low_priority: it runs on a low-priority stream, on SMs that the step leaves idle.
        always: :meth:`.base.Policy.look_ahead` has something to do in steps that do not look ahead, too.
        each_step: replayed steps are accounted for one by one, as they come.
    """

    low_priority: bool = True
    always: bool = False
    each_step: bool = False
