"""An engine for requests that come and go: `Engine`, and what it takes and gives."""

from jkv.serving.engine import Engine
from jkv.serving.kept_programs import KeptPrograms
from jkv.serving.measures import EngineStats, Times
from jkv.serving.record import Completion, EngineError, Event, QueueFull, RequestState
from jkv.serving.submission import RequestRefused, StopSizes

__all__ = [
    "Completion",
    "Engine",
    "EngineError",
    "EngineStats",
    "Event",
    "KeptPrograms",
    "QueueFull",
    "RequestRefused",
    "RequestState",
    "StopSizes",
    "Times",
]
