"""Routes of a running server that the host passes on: its metrics, and /upstream."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.fake_upstream import TWO, Stage, staged

from coldstart.host.live import host_routes
from coldstart.host.live.access_control import READ_PATHS

METRICS = """# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 2.0
"""
READ = "coldstart_host_server_metrics_read"


async def _samples(stage: Stage) -> dict[tuple[str, str | None], float]:
    async with stage.client.get(stage.url + "/metrics") as answer:
        assert answer.status == 200 and answer.content_type == "text/plain"
        text = await answer.text()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {(one.name, one.labels.get("model")): one.value for family in families for one in family.samples}


async def test_metrics_do_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    async with staged(tmp_path, memory=20) as stage:
        stage.servers.metrics = METRICS
        stage.servers.hung = {"b"}
        for name in "ab":
            await stage.ask(model=name, prompt=1)
        began = time.monotonic()
        found = await _samples(stage)
        assert time.monotonic() - began < host_routes.METRICS_S + 5
        assert found["vllm:num_requests_running", "a"] == 2.0
        assert (found[READ, "a"], found[READ, "b"]) == (1.0, 0.0)


async def test_text_of_a_server_that_is_no_metrics_is_omitted(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        stage.servers.metrics = METRICS + "<html>\n"
        await stage.ask(model="a", prompt=1)
        found = await _samples(stage)
        assert found[READ, "a"] == 0.0 and ("vllm:num_requests_running", "a") not in found


async def test_upstream_reads_safe_routes_of_a_running_server(tmp_path: Path) -> None:
    models = {"org/a": {**TWO["a"], "args": ["--api-key", "own"]}, "b": TWO["b"]}
    async with staged(tmp_path, models) as stage:

        async def get(path: str) -> tuple[int, str]:
            async with stage.client.get(stage.url + path) as answer:
                return answer.status, await answer.text()

        status, text = await get("/upstream/org/a/version")
        assert status == 404 and "it is stopped" in text and not stage.servers.begun
        assert (await stage.ask(model="org/a", prompt=1))[0] == 200
        for name in ("org/a", "alpha"):
            assert await get(f"/upstream/{name}/version") == (
                200,
                '{"version": "fake", "key": "Bearer own"}',
            )
        asked = list(stage.servers.begun[0].paths)
        for path in ("sleep", "wake_up", "v1/load_lora_adapter", "server_info", "v1/models"):
            assert (await get(f"/upstream/org/a/{path}"))[0] == 404
            async with stage.client.post(f"{stage.url}/upstream/org/a/{path}", json={}) as answer:
                assert answer.status == 405
        assert (await get("/upstream/nobody/version"))[0] == 404
        assert (await get("/upstream/version"))[0] == 404
        assert stage.servers.begun[0].paths == asked


async def test_reads_without_a_model_reach_the_default_or_the_only_model(tmp_path: Path) -> None:
    async def work(models: dict[str, Any], status: int, **limits: Any) -> None:
        async with staged(tmp_path, models, **limits) as stage:

            async def get(path: str) -> tuple[int, str]:
                async with stage.client.get(stage.url + path) as answer:
                    return answer.status, await answer.text()

            assert (await get("/version"))[0] == 404 and not stage.servers.begun
            for name in models:
                assert (await stage.ask(model=name, prompt=1))[0] == 200
            found, text = await get("/version")
            assert found == status
            assert ("does not specify a model" in text) if status == 404 else ("Bearer of-a" in text)
            # The server of the double knows /version only and answers others itself.
            for path in READ_PATHS:
                _, text = await get(path)
                assert "unknown path" not in text, path
                async with stage.client.post(stage.url + path, json={}) as answer:
                    assert answer.status == 405

    own = {name: {**TWO[name], "args": ["--api-key", f"of-{name}"]} for name in "ab"}
    await work({"a": own["a"]}, 200)
    await work(own, 404, memory=20)


def test_samples_of_a_family_stand_together_and_name_their_model() -> None:
    text = '# TYPE up gauge\nup{y="} 1"} 2.0\n# TYPE down gauge\ndown 1.0\n'
    merged = host_routes.merge_metrics("# TYPE own gauge\nown 1.0\n", [('q"\\\n', text), ("b", text)])
    families = {one.name: one.samples for one in text_string_to_metric_families(merged)}
    assert [(one.labels, one.value) for one in families["up"]] == [
        ({"model": 'q"\\\n', "y": "} 1"}, 2.0),
        ({"model": "b", "y": "} 1"}, 2.0),
    ]
    assert [one.labels["model"] for one in families["down"]] == ['q"\\\n', "b"]
    assert merged.count("# TYPE") == len(families) == 3


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('# TYPE up gauge\n# EOF\nup{y="} 1"} 1 1395066363000\n\nup{} +Inf\nup 2.5e-03\n', True),
        *((text, False) for text in (
            "<html>", "up{", 'up{a="b} 1', 'up{a="b"c="d"} 1', "up one", "1up 1", "up 1 2 3", 'up{a="\nb"} 1',
        )),
    ],
)  # fmt: skip
def test_metrics_of_a_server_are_in_the_text_format(text: str, valid: bool) -> None:
    assert host_routes.is_prometheus_text(text) is valid


def test_other_comments_and_separators_within_a_line_change_no_sample() -> None:
    merged = host_routes.merge_metrics("", [("m", '# TYPE up gauge\n# EOF\nup{y="a\u2028b"} 2.0\n')])
    (family,) = text_string_to_metric_families(merged)
    assert [(one.labels, one.value) for one in family.samples] == [({"model": "m", "y": "a\u2028b"}, 2.0)]
