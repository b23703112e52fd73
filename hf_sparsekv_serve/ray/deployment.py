"""Replicas of the server under Ray Serve: one engine each, on one GPU, or tensor parallel on several of a machine.

    from ray import serve
    from hf_sparsekv_serve.ray.deployment import build
    serve.run(build({"model": "Qwen/Qwen3-8B", "replicas": 2}), blocking=True)

or ``serve run config.yaml`` with ``import_path: hf_sparsekv_serve.ray.deployment:build`` (docs/serving-scale.md). Ray
starts, watches and replaces replicas. Its proxies send them requests, and :mod:`.router` chooses the replica. Needs the
extra ``ray``.

With ``tensor_parallel`` Ray gives a replica's actor all its GPUs. The actor is rank 0, with engine and application. It
starts the other ranks as its child processes (:mod:`..rank_processes`). Ray does not know them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, model_validator
from ray import serve
from ray.serve import Application, metrics
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig, RequestRouterConfig

from hf_sparsekv.serving.engine import Engine
from hf_sparsekv.serving.stats import EngineStats
from hf_sparsekv_config.serving import ServingConfig
from hf_sparsekv_config.sparse import OffloadConfig
from hf_sparsekv_config.tokens import TokenConfig

from ..http import create_app
from ..http.app import MAX_BODY
from ..http.metrics import COUNTS, NOW, PREFIX
from ..loading import load
from ..process import set_aside, short_turns, warm_up
from ..rank_processes import RankProcesses, Served
from ..ranks import RanksApart
from .router import PrefixRouter
from .scaling import ByRows, Fitting

KEY = "HF_SPARSEKV_API_KEY"  # in the replicas' environment: arguments can be read in Ray's state
RETRY_AFTER_S = 5.0
LOST_S = 2.0  # from the loss of a rank to the replica's end: answers fail, and health checks report why

logger = logging.getLogger("ray.serve")


class Deployed(BaseModel, extra="forbid"):
    """Arguments of :func:`build`: ``args`` of an application in Serve's YAML.

    Attributes:
        model: a directory, a name on the hub, ``small`` or ``random:SHAPE``.
        model_id: the model name for clients. None: ``model``, or the last part of a directory.
        dtype: dtype of the weights, as torch names it (``bfloat16``). ``auto``: as they are stored.
        config: selection method: a preset's name, or fields of :class:`.TokenConfig`. None: its defaults.
        offload: keep full blocks in host memory: True, False, or fields of :class:`.OffloadConfig`.
        serving: fields of :class:`.ServingConfig`.
        max_answer: most tokens of a chat's answer if the client sets no limit. None: as many
            as memory has for each row.
        max_body: most bytes of a request's body.
        allowed_hosts: host names that requests to a proxy on a loopback address may use, if there is no key.
        tensor_parallel: ranks of a replica, each on one GPU of a machine. 1: one GPU has the whole model.
        num_gpus: GPUs of a rank: 1, or 0 for the CPU.
        num_cpus: CPUs that Ray reserves for a replica, all ranks together.
        replicas: number of replicas without autoscaling.
        autoscaling: scale the number of replicas (:class:`.ByRows`): fields of Ray's ``AutoscalingConfig``, as
            ``{"min_replicas": 1, "max_replicas": 8}``. None: always ``replicas``.
        target: share of a replica's rows that autoscaling aims at.
        prefix_routing: route requests with the same prefix to the same replica while it has room.
        drain_s: seconds that running answers get when their replica is removed.
        health_s: seconds between two health checks of a replica.
    """

    model: str = Field(min_length=1)
    model_id: str | None = None
    dtype: str = "auto"
    config: str | dict[str, Any] | None = None
    offload: bool | dict[str, Any] = False
    serving: dict[str, Any] = {}
    max_answer: int | None = Field(None, ge=1)
    max_body: int = Field(MAX_BODY, ge=1)
    allowed_hosts: list[str] = []
    tensor_parallel: int = Field(1, ge=1)
    num_gpus: int = Field(1, ge=0, le=1)
    num_cpus: float = Field(1, ge=0)
    replicas: int = Field(1, ge=1)
    autoscaling: dict[str, Any] | None = None
    target: float = Field(0.8, gt=0, le=1)
    prefix_routing: bool = True
    drain_s: float = Field(600.0, ge=0)
    health_s: float = Field(10.0, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> Deployed:
        """Refuse here what would otherwise fail in a replica, minutes later."""
        if unknown := sorted(set(self.autoscaling or ()) - set(AutoscalingConfig.model_fields)):
            raise ValueError(f"autoscaling: Ray's AutoscalingConfig has no {', '.join(unknown)}")
        if self.dtype != "auto" and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype: torch has no {self.dtype!r}; give bfloat16, float16, float32 or auto")
        try:
            self.engine_arguments()
        except TypeError as error:  # an unknown field; a wrong value is a ValueError already
            raise ValueError(str(error)) from error
        return self

    def engine_arguments(self) -> tuple[TokenConfig | None, OffloadConfig | bool, ServingConfig]:
        """``config``, ``offload`` and ``serving`` of an engine."""
        if isinstance(self.config, str):
            config = TokenConfig.preset(self.config)
        else:
            config = None if self.config is None else TokenConfig(**self.config)
        offload = OffloadConfig(**self.offload) if isinstance(self.offload, dict) else self.offload
        return config, offload, ServingConfig(**self.serving)


def build(args: Deployed | dict[str, Any]) -> Application:
    """An application for ``serve.run`` and ``serve run``.

    Raises:
        ValueError: an argument is wrong or not known.
    """
    args = args if isinstance(args, Deployed) else Deployed(**args)
    _, _, serving = args.engine_arguments()
    options: dict[str, Any] = {"num_replicas": args.replicas}
    if args.autoscaling is not None:
        policy = AutoscalingPolicy(policy_function=ByRows, policy_kwargs={"target": args.target})
        options = {"autoscaling_config": AutoscalingConfig(**{"policy": policy, **args.autoscaling})}
    if args.prefix_routing:
        options["request_router_config"] = RequestRouterConfig(request_router_class=PrefixRouter)
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="Replica",
        ray_actor_options={"num_gpus": args.num_gpus * args.tensor_parallel, "num_cpus": args.num_cpus},
        # Some requests wait in the engine, so that it has the next one at hand and autoscaling sees the queue. With
        # more of them, prefix routing would queue at one replica while others are idle.
        max_ongoing_requests=serving.max_rows + max(1, serving.max_rows // 4),
        max_queued_requests=max(1, serving.max_waiting),
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        health_check_period_s=args.health_s,
        health_check_timeout_s=3 * args.health_s,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=args.drain_s,
        **options,
    )
    return deployment.bind(args.model_dump())


class Replica:
    """One engine, its application and its ranks, in a process of Ray's.

    Ray Serve calls the methods. If a health check fails, it replaces the replica. To remove one, it stops sending
    requests, waits for the running ones (``drain_s``), and deletes the replica.

    A replica that has lost a rank also ends its own process. Ray notices this at once. It would notice an unhealthy
    replica only after three checks, and send it requests until then.

    Args:
        args: fields of :class:`Deployed`.
    """

    def __init__(self, args: dict[str, Any]) -> None:
        self._args = Deployed(**args)
        config, offload, serving = self._args.engine_arguments()
        self._ranks: RankProcesses | None = None
        self._engine: Engine
        if self._args.tensor_parallel > 1:
            served = Served(self._args.model, self._args.dtype, config, offload, serving)
            self._ranks = RankProcesses(self._args.tensor_parallel, served, bool(self._args.num_gpus))
            self._engine = self._ranks.engine()
        else:
            tokenizer, model = load(self._args.model, self._args.dtype, "cuda" if self._args.num_gpus else "cpu")
            self._engine = Engine(model, tokenizer, config, offload, serving)
        self._fitting = Fitting(serving.max_rows)
        self._exported = Exported()
        warm_up(self._engine)
        self._aside = contextlib.ExitStack()
        self._aside.enter_context(set_aside())
        self._aside.enter_context(short_turns())
        if self._ranks is not None:
            self._ranks.when_lost(self._end)

    def __serve_build_asgi_app__(self):
        """Ray Serve calls it after the constructor."""
        args = self._args
        path = Path(args.model).expanduser()
        name = args.model_id or (path.resolve().name if path.is_dir() else args.model)
        key = os.environ[KEY].split() if KEY in os.environ else None
        return create_app(self._engine, name, key, args.max_body, args.max_answer, args.allowed_hosts)

    async def check_health(self) -> None:
        """Raise if a rank is lost, or the engine takes no requests. Ray calls it regularly, so it exports metrics."""
        self._exported.tell(self._engine.stats())
        if self._ranks is not None and (lost := self._ranks.lost) is not None:
            raise lost from self._engine.failed
        if not self._engine.ready:
            raise RuntimeError("the engine takes no requests any more") from self._engine.failed

    def _end(self, lost: RanksApart) -> None:
        """End this process, and with it the other ranks: the engine may wait for the lost one forever."""
        logger.error("%s", lost, exc_info=self._engine.failed)
        time.sleep(LOST_S)
        os._exit(1)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The numbers that :class:`.ByRows` scales with."""
        stats = self._engine.stats()
        fits = self._fitting.seen(stats.running, stats.waiting, stats.held, stats.prefilling)
        return {"asked": stats.running + stats.waiting + stats.held + stats.prefilling, "fits": fits}

    def __del__(self) -> None:
        """Ray Serve calls it when the last request has ended."""
        if engine := getattr(self, "_engine", None):
            engine.close()
        if ranks := getattr(self, "_ranks", None):
            ranks.close()
        if aside := getattr(self, "_aside", None):
            aside.close()


class Exported:
    """An engine's counts as metrics of Ray, which tell replicas apart; ``/metrics`` is any one replica's."""

    def __init__(self) -> None:
        self._gauges = {field: metrics.Gauge(PREFIX + name, about) for name, (field, about) in NOW.items()}
        self._counters = {field: metrics.Counter(PREFIX + name, about) for name, (field, about) in COUNTS.items()}
        self._told = dict.fromkeys(self._counters, 0.0)

    def tell(self, stats: EngineStats) -> None:
        """Export the current state, and the counts since the last call."""
        for field, gauge in self._gauges.items():
            gauge.set(getattr(stats, field))
        for field, counter in self._counters.items():
            new = getattr(stats, field) - self._told[field]
            if new > 0:
                counter.inc(new)
                self._told[field] += new
