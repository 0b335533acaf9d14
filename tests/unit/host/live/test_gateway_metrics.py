"""The host's metrics, as Prometheus reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from coldstart.contract.fallback import Fallback
from coldstart.host import status
from coldstart.host.core import Core
from coldstart.host.events import Arrived
from coldstart.host.live.metrics import HostStatus, Metrics, StartMetrics
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.host.status import HostFacts


def test_metrics_contain_counters_and_status() -> None:
    core = Core(
        [ModelSpec.simple("a", 10, 5.0), ModelSpec.simple("b", 10, 5.0)],
        HostSettings(memory=15, policy="lru"),
    )
    facts = HostFacts()
    facts.refused[429] = 2
    facts.get_model("a").gpu_memory_bytes = 7
    core.handle(Arrived("1", "a"), 0.0)
    metrics = Metrics(HostStatus(lambda: status.document(core, facts, 1.0, 1e9)))
    starts = StartMetrics(metrics.registry)
    starts.count_start(
        "a", "fresh", 2.0, {"read tensors": 0.5, "graphs: 8": 0.25, "graphs: 16": 0.5, "swap out": 0.1}
    )
    starts.count_start("b", "fresh", 1.0, {"read tensors": 0.25})
    starts.count_failed_start("a")
    starts.count_fallbacks([Fallback("kv", "no room"), Fallback("kv", "again")])
    samples = {
        (sample.name.removeprefix("coldstart_host_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }
    assert samples[("requests_total",)] == 1 and samples[("hits_total",)] == 0
    assert samples[("refused_total", "429")] == 2
    assert samples[("model_held", "a")] == 1 and samples[("model_held_bytes", "a")] == 10
    assert samples[("model_gpu_memory_bytes", "a")] == 7 and ("model_gpu_memory_bytes", "b") not in samples
    assert samples[("model_state", "a", "starting")] == 1 and samples[("model_state", "a", "ready")] == 0
    assert samples[("start_seconds_sum", "a", "fresh")] == 2.0
    stages = {
        key[2]: value for key, value in samples.items() if key[0] == "coldstart_start_stage_seconds_sum"
    }
    assert stages == {"read tensors": 0.75, "graphs": 0.75, "swap out": 0.1}
    assert samples[("coldstart_start_stage_seconds_count", "fresh", "read tensors")] == 2
    assert samples[("failed_starts_total", "a")] == 1
    assert samples[("coldstart_fallbacks_total", "kv")] == 2
    assert samples[("memory_limit_bytes",)] == 15
