"""Serving engine with continuous batching: `Engine`, its requests and its results."""

from jkv.serving.device.kept_programs import KeptPrograms
from jkv.serving.engine import Engine
from jkv.serving.request.limits import RequestRefused, StopSizes
from jkv.serving.request.request import Request
from jkv.serving.request.results import Completion, Event
from jkv.serving.request.state import EngineError, RequestStatus
from jkv.serving.scheduler.measures import EngineStats, Times
from jkv.serving.scheduler.scheduler import QueueFull

__all__ = [
    "Request",
    "Completion",
    "Engine",
    "EngineError",
    "EngineStats",
    "Event",
    "KeptPrograms",
    "QueueFull",
    "RequestRefused",
    "RequestStatus",
    "StopSizes",
    "Times",
]
