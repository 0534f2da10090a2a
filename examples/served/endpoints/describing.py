"""Endpoints for the model, health checks, metrics and the version."""

import asyncio
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import jkv
from jkv.serving.prometheus import render

from ..asking.showing import check_model
from ..loading import Served
from ..mistakes import Refused
from .gate import respond


def describe(served: Served) -> list[Route]:
    """Return the routes of model, health, metrics and version."""
    model = {
        "id": served.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "jkv",
        "max_model_len": served.context,
    }

    async def list_models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def show_model(request: Request) -> Response:
        try:
            check_model(served, request.path_params["name"])
        except Refused as error:
            return respond(error)
        return JSONResponse(model)

    async def show_health(request: Request) -> Response:
        failure = getattr(request.app.state, "failure", None)
        return JSONResponse({"status": "ok"}) if failure is None else respond(failure)

    async def show_numbers(_: Request) -> Response:
        text = await asyncio.to_thread(render, served.engine)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def show_version(_: Request) -> Response:
        return JSONResponse({"version": jkv.__version__})

    async def refuse_embeddings(_: Request) -> Response:
        return respond(
            Refused(
                "embeddings are not supported: the model continues text, and its cache "
                "keeps no vector of a whole one; take a model that is made for them",
                status=404,
                code="unsupported_endpoint",
            )
        )

    return [
        Route("/version", show_version),
        Route("/v1/embeddings", refuse_embeddings, methods=["POST"]),
        Route("/health", show_health),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", show_model),
        Route("/metrics", show_numbers),
    ]
