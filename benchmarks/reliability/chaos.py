"""Every process below a host is killed or stopped at random, beside 30 streams of four models.

Targets are all descendants of the host's process: starter, supervisors, servers, engines and templates; the host itself is
not one. Each stream is compared with the tokens of an undisturbed stream. After the last kill, the time until each model
serves again is measured; after the host's end, what it has left behind. Without --real, the servers need no model. With
it, they are vLLM's, forked from the host's runtime template with the bundles in build/chaos, which the first run makes;
the result is chaos-real-cpu.json.

Run: python -m benchmarks reliability/chaos [--minutes 10] [--every SECONDS] [--real]
Time: --minutes, and one minute; the first run with --real, five minutes more
Result: chaos.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.common import ROOT, command_line, finish
from benchmarks.host.servers import ARGS, table
from coldstart.bench import facts
from coldstart.system.proc.tree import ProcessTree
from coldstart.validate.launchers import console

STREAMS, TOKENS, PROMPTS, WITHIN_S, SHARE = 30, 60, 5, 10.0, 0.8
# Seconds without progress after which the host kills a server, without and with --real.
HANG_S, REAL_HANG_S = 3, 4
# Mean seconds between two signals: a real server starts in more than a second, a double in milliseconds.
EVERY_S, REAL_EVERY_S = 3.0, 10.0
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
HEAD = {"temperature": 0, "ignore_eos": True, "stream": True}
REAL = ("tiny-llama", "tiny-qwen2", "tiny-opt", "other-llama")
PREPARED = ROOT / "build" / "chaos"


@dataclass
class Campaign:
    """Counts of one run. `found` lists everything that must not happen."""

    url: str
    models: tuple[str, ...]
    client: aiohttp.ClientSession
    outcomes: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    known: dict[tuple[str, str], str] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)

    async def stream(self, model: str, prompt: str) -> tuple[str, str]:
        """Return the text of a stream and its error; the error is "whole" if there is none, "" if it has no name."""
        body = HEAD | {"model": model, "prompt": prompt, "max_tokens": TOKENS}
        text, error = "", ""
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self.client.post(self.url + "/v1/completions", json=body) as answer:
                if answer.status != 200:
                    return "", str((await answer.json())["error"]["message"])
                async for line in answer.content:
                    if line.startswith(b"data: [DONE]"):
                        error = error or "whole"
                    elif line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        text += "".join(str(choice["text"]) for choice in event.get("choices", ()))
                        error = error or str(event.get("error", {}).get("message", ""))
        return text, error

    async def learn(self) -> None:
        """Record the text of each model and prompt while nothing is killed."""
        for model in self.models:
            for prompt in map(str, range(PROMPTS)):
                text, error = await self.stream(model, prompt)
                assert error == "whole", f"{model}: {error or 'no error is named'}"
                self.known[model, prompt] = text

    async def ask_forever(self, chance: random.Random) -> None:
        """Stream again and again, and compare each text."""
        while True:
            model, prompt = key = chance.choice(list(self.known))
            text, error = await self.stream(model, prompt)
            if not self.known[key].startswith(text) or (error == "whole" and text != self.known[key]):
                self.found.append(f"wrong tokens of {model}: {text[-80:]!r}")
            outcome = "right" if error == "whole" else "named error" if error else "unnamed error"
            self.outcomes[outcome] += 1
            if error != "whole":
                self.errors[error.partition(" (request")[0][:100]] += 1
                await asyncio.sleep(0.2)

    async def strike(self, tree: ProcessTree, until_s: float, every_s: float, chance: random.Random) -> None:
        """Send SIGKILL or SIGSTOP to a random process until `until_s` on the monotonic clock."""
        while time.monotonic() < until_s:
            await asyncio.sleep(chance.uniform(0.5, 1.5) * every_s)
            with suppress(psutil.Error, IndexError):
                family = [one for one in tree.look() if one.pid != tree.pid]
                target, number = chance.choice(family), chance.choice(SIGNALS)
                name = _find_role(target)
                target.send_signal(number)
                self.hits[f"{number.name} {name}"] += 1

    async def recover(self) -> dict[str, float]:
        """Return the seconds from now until each model serves."""
        began, took = time.monotonic(), dict[str, float]()
        for_each = [self._serve(model, began, took) for model in self.models]
        await asyncio.wait_for(asyncio.gather(*for_each), 180)
        return took

    async def _serve(self, model: str, began: float, took: dict[str, float]) -> None:
        while (await self.stream(model, "0"))[1] != "whole":
            await asyncio.sleep(0.1)
        took[model] = round(time.monotonic() - began, 2)


def _find_role(process: psutil.Process) -> str:
    """Return the role of a process below the host: its name, or what its ancestors tell of a fork of vLLM's host."""
    words = " ".join(process.cmdline())
    depth = len([one for one in process.parents() if " ".join(one.cmdline()) == words])
    if "host.live.starter" in words:
        return "supervisor" if depth else "starter"
    if "engine.template" in words:
        return ("template", "api", "engine")[min(depth, 2)]
    return process.name()


def _prepare() -> None:
    """Give the real models bundles, in a cache and with a key of this benchmark's own."""
    os.environ |= {"COLDSTART_CACHE_DIR": str(PREPARED), "XDG_STATE_HOME": str(PREPARED / "state")}
    for model in filter(lambda name: name.startswith("tiny-"), REAL):
        subprocess.run([*console(), "materialize", model, "-q", "--", *ARGS], check=True)


def _host(directory: Path, *, real: bool) -> subprocess.Popen[bytes]:
    """Start the host with directories of its own."""
    models: dict[str, Any] = {name: {"memory": "1GiB", "start_s": 1.0} for name in REAL}
    if real:
        models["other-llama"]["model"] = "tiny-llama"
        models = {name: {**one, "args": ARGS} for name, one in models.items()}
    limits = {"memory": "9GiB", "loaders": 4, "hang_timeout_s": REAL_HANG_S if real else HANG_S}
    file = directory / "host.toml"
    file.write_text(table(models, **limits, resume_streams=True, runtime_template=real))
    own = {"XDG_CONFIG_HOME": str(directory)}
    if not real:
        own |= {f"XDG_{name}_HOME": str(directory) for name in ("STATE", "CACHE")}
    own |= {"TMPDIR": str(directory / "tmp"), "XDG_RUNTIME_DIR": str(directory / "run")}
    for name in ("tmp", "run"):
        (directory / name).mkdir(mode=0o700)
    command = [sys.executable, "-m", "support.chaos_servers", "host", str(file)]
    if real:
        command = [*console(), "host", "--host-file", str(file), "--port", "0"]
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=os.environ | own | {"PYTHONPATH": str(ROOT / "tests")},
            stdout=subprocess.PIPE,
            stderr=log,
        )


async def _campaign(
    process: subprocess.Popen[bytes], tree: ProcessTree, given: argparse.Namespace
) -> dict[str, Any]:
    assert process.stdout is not None
    url = (await asyncio.to_thread(process.stdout.readline)).split()[0].decode()
    limits = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as client:
        campaign = Campaign(url, REAL, client)
        await campaign.learn()
        chance, until_s = random.Random(given.seed), time.monotonic() + 60 * given.minutes
        streams = [asyncio.create_task(campaign.ask_forever(chance)) for _ in range(STREAMS)]
        await campaign.strike(tree, until_s, given.every, chance)
        took = await campaign.recover()
        for one in streams:
            one.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    outcomes = campaign.outcomes
    share = outcomes["right"] / max(1, outcomes.total())
    slow = {model: seconds for model, seconds in took.items() if seconds > WITHIN_S}
    if slow:
        campaign.found.append(f"models that did not serve within {WITHIN_S:g} s: {slow}")
    if outcomes["unnamed error"]:
        campaign.found.append(f"{outcomes['unnamed error']} streams ended without a named error")
    if share < SHARE:
        campaign.found.append(f"only {share:.0%} of the streams were right")
    return {
        "streams": dict(outcomes),
        "right_share": round(share, 4),
        "signals": dict(campaign.hits),
        "errors": dict(campaign.errors),
        "serves_again_s": took,
        "findings": campaign.found,
    }


def _left(family: list[psutil.Process], directory: Path) -> list[str]:
    """Return the processes and files that the host has left behind."""
    _, alive = psutil.wait_procs(family, 10)
    processes = [f"process {one.pid}: {' '.join(one.cmdline())[:80]}" for one in alive]
    files = [
        path for name in ("tmp", "run") for path in (directory / name).rglob("*") if path.suffix != ".lock"
    ]
    return [*processes, *(str(path.relative_to(directory)) for path in files if not path.is_dir())]


def main() -> None:
    """Parse the arguments, run the campaign, and store the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="time in which processes are killed")
    every = f"mean seconds between two signals ({EVERY_S:g}, with --real {REAL_EVERY_S:g})"
    parser.add_argument("--every", type=float, help=every)
    parser.add_argument("--seed", type=int, default=7, help="random seed")
    parser.add_argument("--real", action="store_true", help="vLLM servers of tiny models on the CPU")
    parser.add_argument("--log", action="store_true", help="print the host's log")
    given = parser.parse_args()
    given.every = given.every or (REAL_EVERY_S if given.real else EVERY_S)
    began = time.monotonic()
    if given.real:
        _prepare()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        process = _host(Path(name), real=given.real)
        try:
            # Supervisors are no longer descendants of the host when their starter has died: the tree remembers them.
            tree = ProcessTree(process.pid)
            result = asyncio.run(_campaign(process, tree, given))
            family = [one for one in tree.look() if one.pid != tree.pid]
            process.terminate()
            code = process.wait(90)
            result["findings"] += [f"the host ended with {code}"] if code != 143 else []
            result["findings"] += [f"left behind: {one}" for one in _left(family, Path(name))]
        finally:
            if process.poll() is None:
                process.kill()
            if given.log:
                print((Path(name) / "log").read_text())
    made = {"date": facts.today(), "command": command_line(), "machine": facts.machine()}
    name = "chaos-real-cpu" if given.real else "chaos"
    finish(name, made | result | {"seconds": round(time.monotonic() - began, 1)})
    for one in result["findings"]:
        print(f"found: {one}", file=sys.stderr)
    sys.exit(bool(result["findings"]))


if __name__ == "__main__":
    main()
