"""Prometheus families, each with its samples in one call. Any thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

T = TypeVar("T")
Key: TypeAlias = str | tuple[str, ...]  # the value of the only label, or of each
Samples: TypeAlias = Mapping[tuple[str, str], T] | Mapping[str, T] | Iterable[tuple[Key, T]]


class Histogram(Protocol):
    """The part of a histogram that a family needs, see `stats.py`."""

    total: float

    def buckets(self) -> list[tuple[str, float]]: ...


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def gauges(name: str, text: str, labels: str, samples: Samples[float]) -> GaugeMetricFamily:
    """A family of gauges. `labels` are names separated by spaces."""
    family = GaugeMetricFamily(name, text, labels=labels.split())
    for key, value in _items(samples):
        family.add_metric(key, value)
    return family


def counters(name: str, text: str, labels: str, samples: Samples[float]) -> CounterMetricFamily:
    """A family of counters, as `gauges`."""
    family = CounterMetricFamily(name, text, labels=labels.split())
    for key, value in _items(samples):
        family.add_metric(key, value)
    return family


def histograms(name: str, text: str, labels: str, samples: Samples[Histogram]) -> HistogramMetricFamily:
    """A family of histograms, as `gauges`; "" for no labels, with the key ()."""
    family = HistogramMetricFamily(name, text, labels=labels.split())
    for key, histogram in _items(samples):
        family.add_metric(key, histogram.buckets(), histogram.total)
    return family


def _items(samples: Samples[T]) -> Iterable[tuple[list[str], T]]:
    pairs = samples.items() if isinstance(samples, Mapping) else samples
    return (([key] if isinstance(key, str) else list(key), value) for key, value in pairs)
