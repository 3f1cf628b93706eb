"""Pitstop's engine: replicas, their lifecycle, and the streams that run through them."""

if __name__ == "engine":
    raise ImportError("import pitstop.engine, not engine: the repository root is on sys.path")

from pitstop.engine import errors
from pitstop.engine.drift import ReplicaCheck, VerifyReport
from pitstop.engine.errors import PitstopError
from pitstop.engine.fleet import Fleet
from pitstop.engine.handle import RefitHandle
from pitstop.engine.launch import RolloutEngine
from pitstop.engine.lifecycle import Phase
from pitstop.engine.recovery import Recovery
from pitstop.engine.refit import Deadlines, Outcome, RefitOptions, RefitReport, ReplicaReport
from pitstop.engine.request import Chunk, Completion, SamplingParams, Span
from pitstop.engine.stream import Completions, Stream

__all__ = [
    "Chunk",
    "Completion",
    "Completions",
    "Deadlines",
    "Fleet",
    "Outcome",
    "Phase",
    "PitstopError",
    "Recovery",
    "RefitHandle",
    "RefitOptions",
    "RefitReport",
    "ReplicaCheck",
    "ReplicaReport",
    "RolloutEngine",
    "SamplingParams",
    "Span",
    "Stream",
    "VerifyReport",
    "errors",
]
