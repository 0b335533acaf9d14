"""Prometheus metrics of a fleet's gateway: the answers as a host counts them, and `coldstart_fleet_...` for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coldstart.gateway.metrics import Metrics

if TYPE_CHECKING:
    from coldstart.cluster.front import FleetFront

_PREFIX = "coldstart_fleet_"


class FleetMetrics(Metrics):
    """Of one gateway."""

    def __init__(self, front: FleetFront) -> None:
        super().__init__(_Gateway(front), _PREFIX)


class _Gateway(Collector):
    def __init__(self, front: FleetFront) -> None:
        self._front = front

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client asks for it."""
        front = self._front
        yield CounterMetricFamily(f"{_PREFIX}requests", "Requests for a deployed model.", front.total)
        yield CounterMetricFamily(
            f"{_PREFIX}again", "Requests taken in anew, their server gone.", front.again_count
        )
        yield CounterMetricFamily(
            f"{_PREFIX}resumed", "Of these: streams that had begun.", front.resumed_count
        )
        yield CounterMetricFamily(
            f"{_PREFIX}moved", "Streams handed over to another worker.", front.moves.count
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}controller_up", "Whether the controller answers.", float(front.connected)
        )
        refused = CounterMetricFamily(f"{_PREFIX}refused", "Requests refused, by status.", labels=["code"])
        for code, count in front.facts.refused.items():
            refused.add_metric([str(code)], count)
        yield refused
        held = GaugeMetricFamily(f"{_PREFIX}model_held", "Requests that wait.", labels=["model"])
        busy = GaugeMetricFamily(f"{_PREFIX}model_in_flight", "Requests that are answered.", labels=["model"])
        groups = GaugeMetricFamily(f"{_PREFIX}model_groups", "Groups that serve.", labels=["model"])
        for name, waiting, answered in front.load():
            held.add_metric([name], waiting)
            busy.add_metric([name], answered)
            groups.add_metric([name], sum(target.name == name for target in front.targets.values()))
        yield from (held, busy, groups)
