"""Cold starts of a live fleet whose links are slow: one worker, and a pipeline of two, each rank fetching its own layers.

    python benchmarks/fleet_links.py [--rates 4.5MB 5.5MB 7MB] [--rounds 1] [--out FILE]      # as root

At each rate a new fleet: the gateway with Ray's first node, two nodes that are servers, and the source of the weights, each in
a network namespace of its own (tests/tools/link_cluster.py); what comes into a node passes tc's token bucket at that rate.
Ray, actors, starters, prefetchers and vLLM all run in their node's namespace: everything that a node is told or fetches
comes over its link, the ranks' meeting and their activations included. They share the processors and the disk of this one
machine, and the model's directory, in which there are no weights.

1. one worker: the model is deployed without a limit, so one server takes it. 2. a pipeline: deployed with a limit for the
first token that one link cannot keep and two can. Before each, the prefetchers are ended and their memory with them. A
request waits at the gateway meanwhile; `ttft_s` is from sending it until its first token is there. `predicted_s` is what the
core predicted when it chose: with the link as observed by the start before, where there was one, and the bundles' own time to
ready beside it. Shares are bytes that a rank's prefetcher fetched over all bytes of the tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests")]

from common import RESULTS  # noqa: E402
from tools.link_cluster import LinkCluster, lacking, link_cluster  # noqa: E402
from weight_path import checkpoint  # noqa: E402

from coldstart.host.configuration import size  # noqa: E402
from coldstart.measure.bench import facts  # noqa: E402
from coldstart.validate.launchers import console  # noqa: E402

RESULT = RESULTS / "fleet-links-cpu.json"
CONFIG = checkpoint.CONFIG | {"num_hidden_layers": 8}
WORDS = ["--max-model-len", "512", "--kv-cache-memory-bytes", "134217728"]
PIPELINE = [*WORDS, "--pipeline-parallel-size", "2"]
NODES = ("one", "two")
RATIO_BAR, SHARE_BAR, ERROR_BAR = 0.65, 0.52, 0.15
PATIENCE_S = 900.0


class LinkedFleet:
    """A gateway (with `words`), two servers and the source; each server's link is of `rate` bytes/s."""

    def __init__(self, cluster: LinkCluster, root: Path, weights: Path, rate: float, *words: str) -> None:
        self.cluster, self.root, self.weights, self.rate, self.words = cluster, root, weights, rate, words
        self.processes: list[subprocess.Popen[bytes]] = []
        self.source = self.url = self.key = ""

    def begin(self) -> None:
        """Returns when both servers are there."""
        cluster, root, weights, rate = self.cluster, self.root, self.weights, self.rate
        for name in ("source", "head"):
            cluster.add(name)
        for name in NODES:
            cluster.add(name, rate)
        command = [
            sys.executable,
            "-m",
            "support.range_server",
            str(weights),
            cluster.address("source"),
            "8080",
        ]
        source = self._begin("source", command, cwd=HERE.parent / "tests")
        self.source = source.stdout.readline().decode().strip()  # type: ignore[union-attr]
        where = ["--host", cluster.address("head"), "--port", "8000", "--state", str(root / "state.json")]
        up = self._begin("head", [*console(), "fleet", "up", "--ranks", "2", *self.words, *where])
        assert up.stdout is not None and up.stdout.readline(), self.said("head")
        known = json.loads((root / "head" / "coldstart" / "fleet.json").read_text())
        self.url, self.key = known["url"], known["admin_key"]
        link = ["--memory", "8GB", "--network", f"{rate:.0f}B", "--load", "10GB"]
        for name in NODES:
            self._begin(
                name, [*console(), "fleet", "join", known["ray"], *link], RAY_AUTH_TOKEN=known["token"]
            )
        self.until(lambda status: len(status["servers"]) == len(NODES), "no servers")

    def environment(self, name: str) -> dict[str, str]:
        own = {"XDG_RUNTIME_DIR": str(self.root / name), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        place = {"GLOO_SOCKET_IFNAME": "eth0", "VLLM_HOST_IP": self.cluster.address(name)}
        return os.environ | own | place | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

    def _begin(
        self, name: str, words: list[str], *, cwd: Path | None = None, **env: str
    ) -> subprocess.Popen[bytes]:
        (self.root / name).mkdir(mode=0o700)
        with (self.root / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                self.cluster.within(name, *words),
                env=self.environment(name) | env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log if name in NODES else subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def said(self, name: str) -> str:
        log = self.root / f"{name}.log"
        return log.read_text(errors="replace")[-5000:] if log.exists() else ""

    def run(self, name: str, *words: str) -> None:
        subprocess.run(self.cluster.within(name, *console(), *words), env=self.environment(name), check=True)

    def status(self) -> Any:
        asked = urllib.request.Request(
            self.url + "/fleet/status", headers={"x-coldstart-admin-key": self.key}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.loads(answer.read())

    def until(self, true: Any, otherwise: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := true(self.status())):
            assert time.monotonic() < deadline, f"{otherwise}: {self.status()}\n{self.said('head')}"
            time.sleep(0.5)
        return found

    def first_token_s(self, model: str) -> float:
        """From sending a request until its first token is there."""
        body = {
            "model": model,
            "prompt": "Once upon a time",
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
        }
        asked = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        began = time.monotonic()
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    said = json.loads(line[6:])
                    assert "choices" in said, said
                    return time.monotonic() - began
        raise AssertionError(f"no token came\n{self.said('head')}")

    def forget(self) -> None:
        """End the prefetchers, and with them what they have in memory."""
        for name in NODES:
            command = self.cluster.within(name, *console(), "prefetch", "stop")
            subprocess.run(command, env=self.environment(name), check=False, capture_output=True)

    def end(self) -> None:
        self.forget()
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait(120)


@contextmanager
def linked_fleet(weights: Path, rate: float, *words: str) -> Iterator[LinkedFleet]:
    """It ends with the block."""
    with tempfile.TemporaryDirectory(prefix="cl-", dir="/tmp") as place, link_cluster() as cluster:
        made = LinkedFleet(cluster, Path(place), weights, rate, *words)
        try:
            made.begin()
            yield made
        except BaseException:
            for name in ("head", *NODES):
                print(f"--- {name}\n{made.said(name)}", file=sys.stderr)
            raise
        finally:
            made.end()


def _started(fleet: LinkedFleet, model: Path, total: int, slo_s: float | None) -> dict[str, Any]:
    """One cold start: the model is deployed, asked for, looked at, and removed."""
    fleet.forget()
    limit = [] if slo_s is None else ["--slo", f"ttft={slo_s:.1f}"]
    words = ["--name", "m", "--weights-from", fleet.source, *limit, "--", *WORDS]
    fleet.run("head", "fleet", "deploy", str(model), *words)
    fleet.until(lambda status: [one for one in status["models"] if one["name"] == "m"], "not deployed")
    before = {name: fleet.cluster.received(name) for name in NODES}
    ttft_s = fleet.first_token_s("m")
    came = {name: fleet.cluster.received(name) - before[name] for name in NODES}
    status = fleet.status()
    (group,) = (group for one in status["models"] for group in one["groups"])
    fleet.run("head", "fleet", "remove", "m")
    fleet.until(lambda status: not status["models"], "not gone")
    shares = [worker["fetched_bytes"] / total for worker in group["workers"]]
    return {
        "ranks": len(group["workers"]),
        "ttft_s": ttft_s,
        "predicted_s": group["predicted_s"],
        "error": abs(group["predicted_s"] - ttft_s) / ttft_s,
        "ready_s": group["start_s"],
        "mode": group["mode"],
        "fallbacks": [
            step | {"reason": " ".join(facts.without_paths(step["reason"].split()))}
            for step in group["fallbacks"]
        ],
        "fetched_s": [worker["fetched_s"] for worker in group["workers"]],
        "fetched_bytes": [worker["fetched_bytes"] for worker in group["workers"]],
        "shares": shares,
        "came_in_bytes": came,
        "observed_bytes_s": [server["observed_bytes_s"] for server in status["servers"]],
    }


def _at(rate: float, rounds: int, weights: Path, model: Path, total: int) -> list[dict[str, Any]]:
    rows = []
    with linked_fleet(weights, rate, "--no-consolidate") as fleet:
        for _ in range(rounds):
            for slo_s in (None, 0.75 * total / rate):
                row = {"rate": rate, **_started(fleet, model, total, slo_s)}
                print(json.dumps(row), flush=True)
                rows.append(row)
    return rows


def prepared() -> Path:
    """The model, with the bundles of one worker and of two ranks."""
    weights = checkpoint.built(CONFIG)
    for words in (WORDS, PIPELINE):
        subprocess.run([*console(), "materialize", str(weights), "--", *words], check=True)
    return weights


def bare(model: Path) -> Path:
    """The model's directory without its weights."""
    place = model.with_name(model.name + "-bare")
    if not place.is_dir():
        shutil.copytree(model, place, ignore=shutil.ignore_patterns("*.safetensors*"))
    return place


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios by rate, the largest share of a rank, errors of the predictions, each beside its bar."""
    rates = sorted({row["rate"] for row in rows})

    def of(rate: float, ranks: int) -> float:
        return median(row["ttft_s"] for row in rows if row["rate"] == rate and row["ranks"] == ranks)

    ratios = {f"{rate:.0f}": of(rate, 2) / of(rate, 1) for rate in rates}
    largest = max(share for row in rows if row["ranks"] == 2 for share in row["shares"])
    errors = [row["error"] for row in rows]
    return {
        "ratio": ratios,
        "ratio_bar": RATIO_BAR,
        "ratio_met": max(ratios.values()) <= RATIO_BAR,
        "largest_share": largest,
        "share_bar": SHARE_BAR,
        "share_met": largest <= SHARE_BAR,
        "median_error": median(errors),
        "worst_error": max(errors),
        "error_bar": ERROR_BAR,
        "error_met": median(errors) <= ERROR_BAR,
    }


def main() -> None:
    """Bundles where there are none yet, then every rate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["4.5MB", "5.5MB", "7MB"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    if reason := lacking():
        raise SystemExit(f"skipped: {reason}")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    weights = prepared()
    load, began = os.getloadavg()[0], time.time()
    total, model = checkpoint.size(weights), bare(weights)
    rates = [float(size(rate)) for rate in given.rates]
    rows = [row for rate in rates for row in _at(rate, given.rounds, weights, model, total)]
    about = {
        "command": f"python benchmarks/fleet_links.py {' '.join(sys.argv[1:])}".rstrip(),
        "seconds": time.time() - began,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "model_bytes": total,
        "layers": CONFIG["num_hidden_layers"],
    }
    found = {"about": about, "summary": summary(rows), "rows": rows}
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["summary"], indent=1))


if __name__ == "__main__":
    main()
