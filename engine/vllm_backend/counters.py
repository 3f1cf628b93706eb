"""An engine's own Prometheus series, in a registry of its own.

vLLM keeps them in the process's registry, where a second engine takes the first one's away.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from pitstop.engine.counters import Series

# The same for every series of one engine.
_OURS: Final = frozenset({"model_name", "engine"})


class Statistics:
    """What one engine counts. `logger` is a vLLM stat logger factory, for one engine."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        self._registry = CollectorRegistry()
        self.logger: Any = _within(PrometheusStatLogger, self._registry)

    def series(self) -> Iterator[Series]:
        """Yield what it has counted by now. Takes a millisecond or two."""
        for family in self._registry.collect():
            for sample in family.samples:
                part = sample.name.removeprefix(family.name).removeprefix("_")
                wanted = {"counter": ("total",), "gauge": ("",), "histogram": ("sum", "count")}.get(family.type, ())
                if part not in wanted:
                    continue
                labels = {name: value for name, value in sample.labels.items() if name not in _OURS}
                yield Series(
                    family.name, sample.value, labels, part if family.type == "histogram" else "",
                    family.type == "gauge",
                )  # fmt: skip


def _within(made: Any, registry: Any) -> Any:
    """Return `made`, or what it makes series with, bound to a registry. vLLM's loggers name it in class attributes."""
    from prometheus_client.metrics import MetricWrapperBase

    if issubclass(made, MetricWrapperBase):
        return partial(made, registry=registry)
    named = {name: getattr(made, name) for name in dir(made) if name.endswith("_cls")}
    bound = {name: _within(value, registry) for name, value in named.items() if isinstance(value, type)}
    return type(made.__name__, (made,), bound)
