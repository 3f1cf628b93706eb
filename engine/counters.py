"""An engine's counters as one flat mapping, what happened between two of them, and how drafts fared. Pure.

A key is vLLM's metric name and, where several series share it, `|label=value`; a histogram is `|sum` and `|count`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

Value = float | tuple[float, ...]

_DRAFTS: Final = "vllm:spec_decode_num_drafts"
_DRAFTED: Final = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED: Final = "vllm:spec_decode_num_accepted_tokens"
_PER_POSITION: Final = "vllm:spec_decode_num_accepted_tokens_per_pos"
_POSITION: Final = "position"


@dataclass(frozen=True, slots=True)
class Series:
    """One number that an engine keeps. `part` is "sum" or "count" of a histogram; a gauge is a level, not a count."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    part: str = ""
    gauge: bool = False

    @property
    def key(self) -> str:
        """What it is called in `Counters.values`."""
        labels = (f"{name}={value}" for name, value in sorted(self.labels.items()) if name != _POSITION)
        return "|".join(filter(None, (self.name, *labels, self.part)))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How drafts fared. `length`: mean tokens of a step, the target's own one included.

    `rate`: accepted of all draft tokens. `per_position`: for the first draft token, the second, ... how many of the
    drafts were accepted that far.
    """

    drafts: int
    length: float
    rate: float
    per_position: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counters:
    """All that one incarnation of an engine has counted. Empty where its statistics are off.

    `gauges` names the values that are levels.
    """

    values: Mapping[str, Value] = field(default_factory=dict)
    incarnation: int = 0
    gauges: frozenset[str] = frozenset()

    def since(self, before: Counters) -> Counters:
        """Return what was counted after `before`; gauges stay as they are.

        An engine that was started again has counted from zero, which shows in its incarnation or in a count that
        went back. A series that does not exist is left out, not zero.
        """
        counts = {name: value for name, value in self.values.items() if name not in self.gauges}
        again = self.incarnation != before.incarnation or any(
            _went_back(before.values[name], value) for name, value in counts.items() if name in before.values
        )
        earlier = {} if again else before.values
        return Counters(
            {
                name: _less(value, earlier[name]) if name in counts and name in earlier else value
                for name, value in self.values.items()
            },
            self.incarnation,
            self.gauges,
        )

    def acceptance(self) -> Acceptance | None:
        """Return how drafts fared; None for an engine that has no drafter, or does not count."""
        if _DRAFTS not in self.values:
            return None
        drafts, drafted, accepted = (_number(self.values.get(name, 0.0)) for name in (_DRAFTS, _DRAFTED, _ACCEPTED))
        each = self.values.get(_PER_POSITION)
        shares = _tuple(each) if each is not None and drafts else ()
        return Acceptance(
            int(drafts),
            1.0 + accepted / drafts if drafts else 1.0,
            accepted / drafted if drafted else 0.0,
            {n: value / drafts for n, value in enumerate(shares, 1)},
        )


def flatten(series: Iterable[Series], incarnation: int = 0) -> Counters:
    """Make one mapping of series. Those that differ in a `position` only become one tuple, by position."""
    values: dict[str, Value] = {}
    places: dict[str, dict[int, float]] = {}
    gauges = set()
    for one in series:
        if one.gauge:
            gauges.add(one.key)
        if _POSITION in one.labels:
            places.setdefault(one.key, {})[int(one.labels[_POSITION])] = one.value
        else:
            values[one.key] = one.value
    values |= {key: tuple(found[n] for n in sorted(found)) for key, found in places.items()}
    return Counters(values, incarnation, frozenset(gauges))


def _number(value: Value) -> float:
    return sum(value) if isinstance(value, tuple) else value


def _tuple(value: Value) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _went_back(before: Value, after: Value) -> bool:
    earlier, later = _tuple(before), _tuple(after)
    return len(earlier) != len(later) or any(b > a for b, a in zip(earlier, later, strict=True))


def _less(after: Value, before: Value) -> Value:
    found = tuple(a - b for a, b in zip(_tuple(after), _tuple(before), strict=True))
    return found if isinstance(after, tuple) else found[0]
