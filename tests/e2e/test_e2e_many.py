"""Two real models behind one endpoint with memory for one, requested in turn by OpenAI's client."""

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from support.processes import find_family, remaining, wait_until
from tools.bursts import complete, open_client, replay
from tools.machine import EAGER, PROMPTS, READY_S, VLLM, Machine, Tokens

pytestmark = pytest.mark.vllm
BIG = 11 << 26


class Hosted:
    """A host, its client, and every process seen at a status request."""

    def __init__(self, pid: int, url: str) -> None:
        self.pid, self.url, self.client = pid, url, open_client(url)
        self.family: list[psutil.Process] = []

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + "/status", timeout=60) as answer:
            said = dict(json.loads(answer.read()))
        pids = [model["pid"] for model in said["models"] if model["pid"]]
        self.family += find_family(self.pid, *pids)
        return said


def test_two_models_in_memory_for_one(
    machine: Machine, engine_template: None, reference: Tokens, tmp_path: Path
) -> None:
    file = tmp_path / "host.toml"
    models = "\n".join(
        f'[models.{name}]\nargs = {json.dumps(args)}\nmemory = {BIG}\naliases = ["{name}-alias"]\nmode = "{mode}"'
        # The host's runtime template has the arguments of a model that can be forked from it, which needs no bundle.
        for name, args, mode in (("tiny-llama", VLLM, "template-engine"), ("tiny-qwen2", EAGER, "auto"))
    )
    # Memory for one model and the host's runtime template (540 MiB), and too little for two once they are measured, which
    # is about 500 MiB each.
    file.write_text(f'memory = {BIG + (9 << 26)}\non_miss = "warn"\n{models}\n')
    with machine.gateway("host", "--host-file", str(file)) as (process, url, _):
        host = Hosted(process.pid, url)
        assert [model.id for model in host.client.models.list()][::2] == ["tiny-llama", "tiny-qwen2"]
        tokens = [complete(host.client, "tiny-llama", prompt) for prompt in PROMPTS]
        assert tokens == reference
        # Until the template has its memory, there is enough for both models once the first is measured.
        wait_until(lambda: host.status()["host"]["runtime_template_bytes"] > 64 << 20, READY_S)
        found = replay(machine, url, "--models", "tiny-llama,tiny-qwen2")
        assert found["models"].keys() == {"tiny-llama", "tiny-qwen2"}
        assert _streamed(host, "tiny-qwen2-alias")
        said = host.status()
        assert [model["state"] for model in said["models"]] == ["stopped", "ready"]
        assert complete(host.client, "tiny-llama-alias", PROMPTS[0]) == reference[0]
        with pytest.raises(openai.NotFoundError, match="unknown"):
            host.client.completions.create(model="unknown", prompt="x")
        said = host.status()
        assert [model["state"] for model in said["models"]] == ["ready", "stopped"]
        assert [one["mode"] for one in said["recent_starts"]] == [
            "template-engine",
            "template-runtime",
            "template-engine",
        ]
        assert said["starts"]["failed"] == 0 and said["models"][0]["last_start"]["phases"]
        assert said["models"][0]["last_start"]["fallbacks"] == []
        shown = machine.run("host", "status", "--url", host.url)
        assert "tiny-llama  ready" in shown and "template-engine" in shown
        wait_until(lambda: host.status()["models"][0]["memory_source"] == "observed", READY_S)
        assert 64 << 20 < host.status()["models"][0]["held_bytes"] < BIG
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    template = [one for one in host.family if _is_template(machine, one.pid)]
    assert remaining([one for one in host.family if one not in template]) == []
    assert list((machine.root / "run" / "coldstart").glob("host-*")) == []


def _streamed(host: Hosted, model: str) -> str:
    pieces = host.client.completions.create(model=model, prompt="a b c", max_tokens=8, stream=True)
    return "".join(piece.choices[0].text for piece in pieces)


def _is_template(machine: Machine, pid: int) -> bool:
    said = json.loads(machine.run("template", "status", "--format", "json"))
    return pid in [one["pid"] for one in said["templates"]]
