"""Prometheus metrics of a fleet's gateway: answers under the host's metric names, and `coldstart_fleet_...` for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "coldstart_fleet_"


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Waiting and running requests of one model, the groups that serve it, and the number of servers that hung."""

    model: str
    waiting: int
    in_flight: int
    groups: int
    hung: int


@dataclass(frozen=True, slots=True)
class GatewayFigures:
    """All values of one gateway at one moment; `refused` by HTTP status."""

    requests: int
    again: int
    resumed: int
    moved: int
    refused: Mapping[int, int]
    models: tuple[ModelLoad, ...]


class FleetCollector(Collector):
    """Collector over the values that `read` returns."""

    def __init__(self, read: Callable[[], GatewayFigures]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family, as prometheus_client requires."""
        figures = self._read()
        yield from _counters(figures)
        yield from _loads(figures.models)


def _counters(figures: GatewayFigures) -> Iterator[Metric]:
    for name, about, value in (
        ("requests", "Number of requests for a deployed model.", figures.requests),
        ("again", "Number of requests admitted again after their server failed.", figures.again),
        ("resumed", "Number of admitted-again requests whose stream had begun.", figures.resumed),
        ("moved", "Number of streams handed over to another worker.", figures.moved),
    ):
        yield CounterMetricFamily(PREFIX + name, about, value)
    refused = CounterMetricFamily(
        f"{PREFIX}refused", "Number of rejected requests, by HTTP status.", labels=["code"]
    )
    for code, count in figures.refused.items():
        refused.add_metric([str(code)], count)
    yield refused


def _loads(models: tuple[ModelLoad, ...]) -> Iterator[Metric]:
    held = GaugeMetricFamily(
        f"{PREFIX}model_held", "Number of requests that wait for the model.", labels=["model"]
    )
    busy = GaugeMetricFamily(f"{PREFIX}model_in_flight", "Number of requests in progress.", labels=["model"])
    groups = GaugeMetricFamily(
        f"{PREFIX}model_groups", "Number of groups that serve the model.", labels=["model"]
    )
    hung = CounterMetricFamily(
        f"{PREFIX}servers_hung", "Number of servers killed because they made no progress.", labels=["model"]
    )
    for one in models:
        hung.add_metric([one.model], one.hung)
        held.add_metric([one.model], one.waiting)
        busy.add_metric([one.model], one.in_flight)
        groups.add_metric([one.model], one.groups)
    yield from (held, busy, groups, hung)
