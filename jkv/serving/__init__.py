"""Serving engine with continuous batching: `Engine`, its requests and its results.

An engine is a host loop around the decode step of `jkv.decoding`. Start with
`scheduler.scheduler.Scheduler.step`: it sends requests (`request`) to the device,
starts the next window of steps (`device.programs.run_window`), and reads the report of
the previous one. `engine` has the public interface.
"""

from jkv.serving.device.kept_programs import KeptPrograms
from jkv.serving.engine import Engine
from jkv.serving.request.limits import RequestRefused, StopSizes
from jkv.serving.request.request import EngineError, Request, RequestStatus
from jkv.serving.request.results import Completion, Event
from jkv.serving.request.texts import TextStream
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
    "TextStream",
    "Times",
]
