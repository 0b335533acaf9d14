"""Prometheus metrics of a fleet's gateway: answers as a host counts them, and `coldstart_fleet_...` for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "coldstart_fleet_"


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Requests of one model that wait and that are being answered, and the groups that serve it."""

    model: str
    waiting: int
    in_flight: int
    groups: int


@dataclass(frozen=True, slots=True)
class GatewayFigures:
    """All figures of one gateway at one moment; `refused` by HTTP status."""

    requests: int
    again: int
    resumed: int
    moved: int
    connected: bool
    refused: Mapping[int, int]
    models: tuple[ModelLoad, ...]


class FleetCollector(Collector):
    """Collector over the figures that `read` returns."""

    def __init__(self, read: Callable[[], GatewayFigures]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family, as prometheus_client requires."""
        figures = self._read()
        yield from _counters(figures)
        yield GaugeMetricFamily(
            f"{PREFIX}controller_up", "Whether the controller answers.", float(figures.connected)
        )
        yield from _loads(figures.models)


def _counters(figures: GatewayFigures) -> Iterator[Metric]:
    for name, about, value in (
        ("requests", "Requests for a deployed model.", figures.requests),
        ("again", "Requests taken in anew, their server gone.", figures.again),
        ("resumed", "Of these: streams that had begun.", figures.resumed),
        ("moved", "Streams handed over to another worker.", figures.moved),
    ):
        yield CounterMetricFamily(PREFIX + name, about, value)
    refused = CounterMetricFamily(f"{PREFIX}refused", "Requests refused, by status.", labels=["code"])
    for code, count in figures.refused.items():
        refused.add_metric([str(code)], count)
    yield refused


def _loads(models: tuple[ModelLoad, ...]) -> Iterator[Metric]:
    held = GaugeMetricFamily(f"{PREFIX}model_held", "Requests that wait.", labels=["model"])
    busy = GaugeMetricFamily(f"{PREFIX}model_in_flight", "Requests that are answered.", labels=["model"])
    groups = GaugeMetricFamily(f"{PREFIX}model_groups", "Groups that serve.", labels=["model"])
    for one in models:
        held.add_metric([one.model], one.waiting)
        busy.add_metric([one.model], one.in_flight)
        groups.add_metric([one.model], one.groups)
    yield from (held, busy, groups)
