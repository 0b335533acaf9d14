"""vLLM's own tests of its HTTP API, against plain vLLM, `coldstart serve` in each mode of this machine, and a host.

A test that passes with plain vLLM must pass with every other way of starting. MODEL is a model directory that
examples/smollm2.py wrote. Needs a package index for vLLM's tests (nothing else is used), and CRIU for the snapshots.

Each way of starting is stored when it is measured; plain vLLM comes first, and `--starts` measures some of the others again.

Run: python -m benchmarks start/vllm_api_tests MODEL [--starts NAME ...]
Time: about 10 minutes for each way of starting, on two busy cores
Result: vllm-api-tests-cpu.json
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import RESULTS, load, parser
from benchmarks.start import vllm_test_files
from coldstart.bench import facts, launchers
from coldstart.bench.run_order import VLLM_WARM
from coldstart.validate.completions import CompletionClient
from coldstart.validate.launch import HOST, Launcher, serving
from coldstart.validate.launchers import Subject, console

RESULT = RESULTS / "vllm-api-tests-cpu.json"
PLAIN, HOSTED, PASSED = "vLLM", "host", "passed"
STARTS = (PLAIN, "fresh", "template-runtime", "snapshot", "template-engine", HOSTED)
START_S = 600.0
# Every argument that one of the test files gives to its server and that needs no other model.
VLLM_ARGS = (
    *("--dtype", "float32", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(512 << 20)),
    *("--enforce-eager", "--enable-prompt-tokens-details", "--no-enable-prefix-caching"),
    *("--enable-tokenizer-info-endpoint", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


def main() -> None:
    """Run the tests against each way of starting and store the outcomes."""
    arguments = parser(__doc__)
    arguments.add_argument("model", type=Path, help="Model directory written by examples/smollm2.py.")
    arguments.add_argument(
        "--starts", nargs="+", choices=STARTS, default=STARTS, help="Ways of starting; default: all."
    )
    given = arguments.parse_args()
    model = str(given.model.resolve(strict=True))
    subject = Subject(model, model, (*VLLM_ARGS, "--served-model-name", model))
    with tempfile.TemporaryDirectory(prefix="cs-") as scratch:
        directory = Path(scratch)
        vllm_test_files.unpack(vllm_test_files.fetch(directory), directory, model)
        taken = ["--snapshot"] if "snapshot" in given.starts else []
        materialize = ["materialize", model, "--profile-seconds", "1", "-q", *taken]
        subprocess.run([*console(), *materialize, *subject.passed_args], check=True)
        for start in given.starts:
            with started(subject, start, directory / start) as url:
                store(start, vllm_test_files.run(directory, url, model))


@contextmanager
def started(subject: Subject, start: str, directory: Path) -> Iterator[str]:
    """Run a server or a host in the block and yield its URL."""
    directory.mkdir(mode=0o700)
    if start == HOSTED:
        with hosting(subject, directory) as url:
            yield url
        return
    work = directory / "work"
    (launcher,) = launchers.launchers(subject, [VLLM_WARM if start == PLAIN else start], work)
    try:
        launcher.prepare()
        with ready(launcher, directory / "run") as url:
            yield url
    finally:
        launcher.close()


@contextmanager
def ready(launcher: Launcher, directory: Path) -> Iterator[str]:
    """Run a server in the block; yield its URL once it answers. Fails if another start mode was used."""
    with serving(launcher, directory) as server:
        client = CompletionClient(HOST, server.files.port)
        client.first_token("x", deadline_s=time.monotonic() + START_S, check=server.check)
        if launcher.tells_readiness:
            report = server.readiness(time.monotonic() + START_S)
            assert report["mode"] == launcher.mode, report
        yield f"http://{HOST}:{server.files.port}"


@contextmanager
def hosting(subject: Subject, directory: Path) -> Iterator[str]:
    """Run a host of the model in the block and yield its URL."""
    file, log = directory / "host.toml", directory / "host.log"
    arguments = json.dumps(list(subject.vllm_args))
    file.write_text(
        f'memory = "8GiB"\n[models.smollm2]\nmodel = {json.dumps(subject.model)}\nargs = {arguments}\n'
    )
    command = [*console(), "host", "run", "--host-file", str(file), "--port", "0"]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        url = line.split()[0]
        client = CompletionClient(HOST, int(url.rpartition(":")[2]), timeout_s=START_S)
        client.complete("x", 1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def store(start: str, found: dict[str, str]) -> None:
    """Add a way of starting to the result: the passed tests, and those that pass with plain vLLM only."""
    document = load(RESULT.stem)
    if start == PLAIN:
        facts_of_run = {"date": facts.today(), "machine": facts.machine(), "vllm": vllm_test_files.VERSION}
        document = {**facts_of_run, "plain": found, "starts": {}}
    wanted = [test for test, outcome in document["plain"].items() if outcome == PASSED]
    document["starts"][start] = {
        "passed": sum(found.get(test) == PASSED for test in wanted),
        "wanted": len(wanted),
        "different": {test: found.get(test, "missing") for test in wanted if found.get(test) != PASSED},
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    print(start, json.dumps(document["starts"][start], indent=1), flush=True)


if __name__ == "__main__":
    main()
