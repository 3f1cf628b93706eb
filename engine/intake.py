"""From what a caller asks for to a flight: rendered, checked, capped to the context, named. Knows what is under way."""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pitstop.engine.adapters import Adapters
from pitstop.engine.errors import InvalidRequest
from pitstop.engine.flight import Admit, Flight
from pitstop.engine.ledger import Place
from pitstop.engine.ports import Booted, Observer, Renderer, Scalar
from pitstop.engine.prompts import render
from pitstop.engine.request import Completion, Prompt, RequestLife, SamplingParams


@dataclass(frozen=True, slots=True)
class Terms:
    """How a request wants to be treated, beyond what it asks for."""

    session_id: str | None
    priority: int
    trace_headers: Mapping[str, str] | None
    adapter: str | None


class Intake:
    """Makes flights of requests."""

    def __init__(
        self,
        renderer: Renderer | None,
        admit: Admit,
        observer: Observer,
        context: Callable[[], Mapping[str, str]],
        labels: Mapping[str, Scalar],
        newest: Callable[[], Place | None],
        adapters: Adapters,
    ) -> None:
        self.renderer = renderer
        # Flights belong to their consumers: one that nobody holds any more is not under way.
        self.flights: weakref.WeakValueDictionary[str, Flight] = weakref.WeakValueDictionary()
        self._admit = admit
        self._observer = observer
        self._context = context
        self._labels = {"operation": "text_completion", **labels}
        self._newest = newest
        self._adapters = adapters
        self._prefix = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()

    def flight(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        terms: Terms,
        booted: Booted,
        *,
        deltas: bool,
    ) -> Flight:
        """Return a flight that has not begun.

        Raises:
            InvalidRequest: it cannot run; says why.
        """
        _well_typed(terms.session_id, terms.priority, terms.trace_headers)
        if terms.adapter is not None:
            self._adapters.current(terms.adapter)
        params = params or SamplingParams()
        rendered = render(prompt, params, self.renderer, booted.max_model_len, booted.vocab_size)
        flight = Flight(
            life=RequestLife(self._name()),
            prompt_token_ids=rendered.token_ids,
            params=params,
            max_tokens=rendered.max_tokens,
            admit=self._admit,
            observer=self._observer,
            deltas=deltas,
            text=bool(params.stop) or (deltas and self.renderer is not None),
            priority=terms.priority,
            session_id=terms.session_id,
            trace_headers=terms.trace_headers if terms.trace_headers is not None else self._context(),
            labels=self._labels,
            newest=self._newest,
            adapter_name=terms.adapter,
            left=self._adapters.left,
        )
        self.flights[flight.request_id] = flight
        return flight

    def refused(self, error: InvalidRequest) -> Completion:
        """Return what a request that cannot run comes to."""
        return Completion(
            request_id=self._name(), prompt_token_ids=(), token_ids=(), logprobs=(), spans=(),
            finish_reason="error", error=error,
        )  # fmt: skip

    def _name(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"


def _well_typed(session_id: object, priority: object, trace_headers: object) -> None:
    # An engine would not refuse a field of another type: it would stop, for everybody.
    if session_id is not None and not isinstance(session_id, str):
        raise InvalidRequest(f"session_id is {session_id!r}, not a string")
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        raise InvalidRequest(f"priority is {priority!r}, not an integer of 32 bits")
    if trace_headers is not None and not (
        isinstance(trace_headers, Mapping)
        and all(isinstance(k, str) and isinstance(v, str) for k, v in trace_headers.items())
    ):
        raise InvalidRequest("trace_headers are not a mapping of strings to strings")
