"""Latency and CPU time of a request to warm servers of each start mode, compared with plain vLLM's.

All servers run at once and answer in turns, in an order that rotates, so that other work on the machine meets all of them.

Run: python -m benchmarks start/steady [--rounds N]
Time: 12 minutes for 100 rounds
Result: steady-cpu.json
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import finish, parser, run_coldstart
from benchmarks.start.cold_start import VLLM_ARGS
from coldstart.bench import run_order, stats
from coldstart.bench.benchmark import prepare_subject
from coldstart.bench.measure import read_cpu_s
from coldstart.launch.completions import CompletionClient
from coldstart.validate.launch import HOST, run_server
from coldstart.validate.launchers import create_launchers

MODES = [mode for mode in run_order.DEFAULT_MODES if mode != run_order.VLLM_COLD]
PROMPT, TOKENS, WARM_UP, START_S = "The quick brown fox jumps over the lazy dog. " * 8, 200, 10, 600.0


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=100)
    rounds = arguments.parse_args().rounds
    samples = defaultdict[tuple[str, str], dict[int, float]](dict)
    with TemporaryDirectory(prefix="steady-") as place, ExitStack() as stack:
        run_coldstart("materialize", "tiny-llama", "-q", "--snapshot", "--", *VLLM_ARGS)
        servers = []
        subject = prepare_subject(run_order.BenchOptions("tiny-llama", VLLM_ARGS))
        for launcher in create_launchers(subject, MODES, Path(place)):
            stack.callback(launcher.close)
            launcher.prepare()
            server = stack.enter_context(run_server(launcher, Path(place) / launcher.mode))
            client = CompletionClient(HOST, server.files.port, START_S)
            deadline_s = server.launched_s + START_S
            client.await_first_token(PROMPT, deadline_s=deadline_s, check=server.check_alive)
            servers.append((launcher.mode, client, server.list_processes()))
        for number in range(-WARM_UP, rounds):
            first = number % len(servers)
            for mode, client, processes in servers[first:] + servers[:first]:
                before = sum(read_cpu_s(processes).values())
                samples[mode, "latency_s"][number] = client.complete(PROMPT, TOKENS).seconds
                samples[mode, "cpu_s"][number] = sum(read_cpu_s(processes).values()) - before
    rows = defaultdict[str, dict[str, object]](dict)
    for (mode, name), by_round in samples.items():
        measured = {number: value for number, value in by_round.items() if number >= 0}
        ratio, ci95 = stats.paired_ratio(measured, samples[run_order.VLLM_WARM, name]) or (None, None)
        rows[mode][name] = {**stats.summarize([*measured.values()]), "ratio": ratio, "ci95": ci95}
    finish("steady-cpu", {"rounds": rounds, "tokens": TOKENS, "modes": rows})


if __name__ == "__main__":
    main()
