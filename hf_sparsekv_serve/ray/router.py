"""Which replica gets a request: the one that may keep its document, else the less busy one of two.

Ray Serve pickles this module by value into its proxies; it knows nothing of hf_sparsekv.
"""

from __future__ import annotations

import random

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica


class PrefixRouter(ConsistentHashRouter):
    """Ray's consistent hashing for requests with a session id or a hint (:mod:`.proxy`).

    Every proxy finds the same replica without asking anybody, and few documents move when replicas come and go. If that
    replica has as many requests as it may (``max_ongoing_requests``), the next ones on the ring are tried, then any.
    Requests without a hint go to the less busy of two replicas, as Ray's default router has it.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas to try, in this order; of a group the least busy one."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        if pending_request.metadata.session_id:
            first = await super().choose_replicas(candidate_replicas, pending_request)
        else:
            pending_request.routing_context.should_backoff = True  # between attempts, when all have been tried
            first = [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        return [*first, candidate_replicas]
