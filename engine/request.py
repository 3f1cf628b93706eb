"""One generation request: what was asked, which weights made which token, and that it ends exactly once. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import index
from typing import Any, Final, Literal, NamedTuple, SupportsIndex

from pitstop.engine.errors import IllegalEvent, InvalidRequest, PitstopError

FinishReason = Literal["stop", "length", "abort", "error"]
Message = Mapping[str, object]
Prompt = str | Sequence[int] | Sequence[Message] | Mapping[str, object]
"""Text, token ids, chat messages, or a mapping with `prompt_token_ids`, `prompt` or `messages`; ids win."""


def _maybe(value: object) -> int | None:
    return None if value is None else index(value)  # type: ignore[arg-type]


def _flag(value: object) -> bool:
    if value is not True and value is not False:
        raise TypeError("not True or False")
    return value


def _ids(values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    return tuple(map(index, values))


_TYPES: Final[Mapping[str, Callable[[Any], object]]] = {
    "max_tokens": _maybe, "min_tokens": index, "temperature": float, "top_p": float, "top_k": index, "min_p": float,
    "presence_penalty": float, "frequency_penalty": float, "repetition_penalty": float, "seed": _maybe,
    "stop_token_ids": _ids, "ignore_eos": _flag, "include_stop": _flag, "logprobs": _flag,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. Unset fields are neutral and never come from the checkpoint's `generation_config`.

    Attributes:
        max_tokens: most tokens to make; None means up to the context length. A larger value is capped to it.
        temperature: 0 is greedy.
        top_k: 0 means no limit.
        seed: makes one request's sampling repeatable on one replica.
        stop: strings that end the text; the text is cut before the match unless `include_stop`. Token ids end
            with the token that completed the match.
        logprobs: also return the log-probability of every sampled token, after temperature and top-p/top-k.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        # An engine would not refuse a field of another type: it would stop, for everybody.
        for name, typed in _TYPES.items():
            try:
                object.__setattr__(self, name, typed(getattr(self, name)))
            except (TypeError, ValueError, OverflowError) as error:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}: {error}") from None
        for wrong, text in (
            (self.max_tokens is not None and self.max_tokens < 0, f"max_tokens is {self.max_tokens}, below 0"),
            (self.min_tokens < 0, f"min_tokens is {self.min_tokens}, below 0"),
            (not self.temperature >= 0, f"temperature is {self.temperature}, not 0 or above"),
            (not 0 < self.top_p <= 1, f"top_p is {self.top_p}, outside (0, 1]"),
            (self.top_k < 0, f"top_k is {self.top_k}, below 0 (0 means no limit)"),
            (not 0 <= self.min_p <= 1, f"min_p is {self.min_p}, outside [0, 1]"),
            (not self.repetition_penalty > 0, f"repetition_penalty is {self.repetition_penalty}, not above 0"),
            ("" in self.stop, "stop has an empty string, which would match at once"),
            (not all(isinstance(text, str) for text in self.stop), "stop has something that is not a string"),
            (self.seed is not None and not -(2**63) <= self.seed < 2**63, f"seed is {self.seed}, not of 64 bits"),
        ):
            if wrong:
                raise InvalidRequest(text)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One version of a named adapter. `number` is its own among all of an engine, `path` the folder it lies in."""

    name: str
    weight_version: int
    number: int = field(repr=False)
    path: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as a backend takes it: ids only, capped to the context, salted by the version it starts under.

    `deltas` asks for tokens as they are made; otherwise one chunk at the end is enough. `text` asks for text.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    cache_salt: str
    deltas: bool
    text: bool
    priority: int = 0
    session_id: str | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    adapter: Adapter | None = None


class Span(NamedTuple):
    """Tokens `[start, end)` of a completion were made by `weight_version`."""

    weight_version: int
    start: int
    end: int


@dataclass(slots=True)  # not frozen: one is made for every step of every stream, and freezing costs half of it
class Piece:
    """What a leg yields: tokens since the last piece, all by one leg, perhaps by several versions.

    `logprobs` has one entry a token, or none at all when they were not asked for.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int | None = None


@dataclass(slots=True)
class Chunk:
    """Tokens `[start, start + len(token_ids))` of a stream, all made by `weight_version`."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    start: int
    weight_version: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request.

    `spans` tile `[0, len(token_ids))`. `finish_reason` is "error" exactly when `error` is set; tokens made
    before the error are kept. `cached_tokens` counts prompt tokens that came from the prefix cache (None if the
    backend does not say). `adapter` is the version of the adapter that all its tokens were made with, if it named one.
    `place` is what `engine.staleness` counts from.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    replica: str | None = None
    stop_reason: str | int | None = None
    cached_tokens: int | None = None
    error: PitstopError | None = None
    adapter: Adapter | None = None
    place: int | None = field(default=None, repr=False)
    render: Callable[[Sequence[int]], str] | str = field(default="", repr=False)

    @property
    def text(self) -> str:
        """The text of the tokens, without special tokens; decoded when first asked for if nothing needed it before."""
        return self.render if isinstance(self.render, str) else self.render(self.token_ids)


class VersionTrack:
    """Which weights made which token of one request, from exact counts at each swap."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, int, int]] = []

    def mark(self, at: int, weight_version: int, place: int | None = None) -> None:
        """Tokens from index `at` on are made by `weight_version`, which stands at `place` (see `ledger.Place`).

        Raises:
            IllegalEvent: `at` lies before an earlier mark.
        """
        if self._marks and at < self._marks[-1][0]:
            raise IllegalEvent(f"token {at} already belongs to version {self._marks[-1][1]}", event="mark")
        if self._marks and self._marks[-1][0] == at:
            self._marks.pop()
        place = weight_version if place is None else place
        if not self._marks or self._marks[-1][1:] != (weight_version, place):
            self._marks.append((at, weight_version, place))

    def cut(self, start: int, end: int) -> list[Span]:
        """Return the spans of tokens `[start, end)`; one empty span where `start == end`."""
        if not self._marks:
            return []
        begun, latest, _ = self._marks[-1]
        if begun <= start:
            return [Span(latest, start, end)]
        spans = []
        for (begin, version, _), stop in zip(self._marks, [at for at, *_ in self._marks[1:]] + [end], strict=True):
            low, high = max(start, begin), min(end, max(stop, begin))
            if low < high:
                spans.append(Span(version, low, high))
        return spans or [Span(self._marks[-1][1], end, end)]

    def oldest(self, end: int) -> int | None:
        """Return the lowest place of tokens `[0, end)`; None where there are none."""
        return min((place for at, _, place in self._marks if at < end), default=None)


class Life(Enum):
    """Where a request is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class RequestLife:
    """The machine of one request. It ends once; a request that has tokens is never taken back to the queue."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.life = Life.QUEUED
        self.taken = 0
        self.finish_reason: FinishReason | None = None
        self.track = VersionTrack()

    def _must(self, life: Life, event: str) -> None:
        if self.life is not life:
            raise IllegalEvent(
                f"{event} cannot happen to request {self.request_id} while {self.life.value}",
                phase=self.life.value,
                event=event,
            )

    def accepted(self, weight_version: int, place: int | None = None) -> None:
        """An engine holds the request and would make its next token with `weight_version`."""
        self._must(Life.QUEUED, "accepted")
        self.track.mark(self.taken, weight_version, place)
        self.life = Life.RUNNING

    def swapped(self, made: int, weight_version: int, place: int | None = None) -> None:
        """The engine had made exactly `made` tokens when its weights became `weight_version`."""
        self._must(Life.RUNNING, "swapped")
        self.track.mark(made, weight_version, place)

    def withdrawn(self, made: int) -> None:
        """The request left its engine without a token and waits for another admission."""
        self._must(Life.RUNNING, "withdrawn")
        if made or self.taken:
            raise IllegalEvent(
                f"request {self.request_id} has {max(made, self.taken)} tokens and cannot be withdrawn",
                phase=self.life.value,
                event="withdrawn",
            )
        self.life = Life.QUEUED

    def took(self, count: int) -> list[Span]:
        """The consumer side has taken `count` more tokens; return the spans they belong to."""
        self._must(Life.RUNNING, "took")
        start, self.taken = self.taken, self.taken + count
        return self.track.cut(start, self.taken)

    def ended(self, reason: FinishReason) -> None:
        """The request is over.

        Raises:
            IllegalEvent: it was over before.
        """
        if self.life is Life.ENDED:
            self._must(Life.RUNNING, "ended")
        self.finish_reason, self.life = reason, Life.ENDED

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans of everything taken so far; empty without tokens."""
        return tuple(s for s in self.track.cut(0, self.taken) if s.start < s.end)

    @property
    def oldest(self) -> int | None:
        """Place of the oldest weights that made a token taken so far; None without tokens."""
        return self.track.oldest(self.taken)
