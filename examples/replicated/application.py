"""Ray Serve application: replicas behind one endpoint."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    HTTPOptions,
    RequestRouterConfig,
)
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.applications import Starlette

from .endpoint import make_endpoint
from .prefixes import CHARACTERS_PER_TOKEN, PIECE_CHARACTERS, STATS_SECONDS
from .replica import Replica
from .routing import PrefixRouter
from .scaling import BySequences

NAME = "jkv"
# Time with too few replicas before another one starts.
UPSCALE_SECONDS = 5.0


def join_cluster(address: str | None = None) -> None:
    """Join a Ray cluster, or start a local one.

    Args:
      address: cluster address, or "auto"; None starts a cluster for this process.
    """
    here = str(Path(__file__).parents[1])
    paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        address,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
        log_to_driver=False,
        include_dashboard=False,
    )


def make_application(
    options: argparse.Namespace, *, api_key: str | None = None
) -> serve.Application:
    """Return the application.

    Args:
      options: command-line options.
      api_key: the key that clients must send; None admits all clients.
    """

    def build() -> Starlette:
        def find_replicas() -> DeploymentHandle:
            return serve.get_deployment_handle(Replica.__name__, NAME)

        return make_endpoint(find_replicas, api_key=api_key)

    most_tokens = options.context * (options.max_running + options.kept_sequences)
    replicas = serve.deployment(Replica).options(
        **choose_number(options.replicas, options.max_running),
        user_config={"weights": str(options.weights or options.model)},
        # Requests wait in the engine, which orders them by priority.
        max_ongoing_requests=options.max_running + options.max_waiting,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={
                "max_pieces": most_tokens * CHARACTERS_PER_TOKEN // PIECE_CHARACTERS
            },
            request_routing_stats_period_s=STATS_SECONDS,
        ),
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=5.0,
    )
    endpoint = serve.deployment(serve.ingress(build)()).options(
        name="Endpoint", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0}
    )
    return endpoint.bind(replicas.bind(options))


def choose_number(replicas: tuple[int, int], places: int) -> Mapping[str, Any]:
    """Return Ray Serve's options for a fixed or autoscaled number of replicas."""
    least, most = replicas
    if least == most:
        return {"num_replicas": least}
    policy = AutoscalingPolicy(
        policy_function=BySequences, policy_kwargs={"places": places}
    )
    scaling = AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        policy=policy,
        upscale_delay_s=UPSCALE_SECONDS,
        look_back_period_s=UPSCALE_SECONDS,
        metrics_interval_s=UPSCALE_SECONDS / 5,
    )
    return {"autoscaling_config": scaling}


def run(application: serve.Application, host: str, port: int) -> None:
    """Deploy or replace the application; return when the replicas are ready."""
    serve.start(http_options=HTTPOptions(host=host, port=port))
    logging = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.run(application, name=NAME, logging_config=logging)
