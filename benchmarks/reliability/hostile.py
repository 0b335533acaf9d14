"""Starts from bundles of a stranger's whose plain sections were mutated."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from coldstart.artifacts.store import Store
from tools import fuzzed

from benchmarks.reliability.run import EAGER, Run, answering, serving

KV = {"bytes": 256 << 20, "blocks": 64, "block_tokens": 16}
"""One that a server can start with: else every start would end by it, and the rest be left out unread."""


def hostile(run: Run, count: int) -> None:
    """Starts from bundles of a stranger's whose plain sections were mutated."""
    plain = run.command("serve", "tiny-llama", "--on-miss", "warn", "--dry-run", "--", *EAGER)
    if plain.returncode:
        raise SystemExit(plain.stdout[-2000:])
    for name, value in run.machine.environment().items():
        os.environ[name] = value
    from coldstart.key import inspection
    from coldstart.machine.paths import Cache

    cache = Cache(run.machine.cache)
    found = inspection.look_up("tiny-llama", EAGER, cache=cache)
    cache.bundles.mkdir(parents=True, exist_ok=True)
    shutil.copytree(cache.bundles, run.machine.root / "bundles", dirs_exist_ok=True)
    with serving(run, "tiny-llama", "--on-miss", "warn", vllm=EAGER) as one:
        answering(run, one, "without a bundle")  # what vLLM itself keeps of the model is there from now on
        one.end()
    first = int(run.counts["seed"]) or 1
    for seed in range(first, first + count):
        if run.over:
            break
        chance = random.Random(seed)
        target = list(fuzzed.PLAIN)[seed % len(fuzzed.PLAIN)]
        shutil.rmtree(cache.bundles)
        store = Store(cache.bundles)
        value = fuzzed.mutated(copy.deepcopy(fuzzed.PLAIN[target]), chance, chance.choice([1, 1, 2, 5]))
        if target == "kv" and chance.random() < 0.5:  # well-formed, and wrong
            value = {
                "bytes": chance.choice([1, 4096, 1 << 40, 1 << 62, 2**63]),
                "blocks": 1,
                "block_tokens": 16,
            }
        if not _publish(store, found.key, target, value, run):
            continue
        before = _shared(cache.root)
        _hostile_start(run, seed, target, value)
        if more := _shared(cache.root) - before:
            run.fail(f"{seed} {target}: written to a shared cache: {sorted(more)[:5]}")
        run.counts["seed"] = seed + 1
    shutil.rmtree(cache.bundles)
    shutil.copytree(run.machine.root / "bundles", cache.bundles)


def _publish(store: Store, key: Any, target: str, value: Any, run: Run) -> bool:
    from coldstart.artifacts.errors import BundleError
    from tools.bundles import provenance

    try:
        with store.begin(key) as draft:
            for name, plain in (fuzzed.PLAIN | {"kv": KV}).items():
                draft.add_json(name, value if name == target else plain)
            draft.publish(provenance("tiny-llama"))
    except (BundleError, ValueError, UnicodeError, OverflowError):
        run.counts["no such bundle can be written"] += 1
        return False
    return True


def _shared(root: Path) -> set[str]:
    """What vLLM would believe later."""
    return {str(path.relative_to(root)) for path in root.glob("vllm/*/modelinfos/*")} | {
        str(path.relative_to(root)) for path in root.glob("unpacked/*")
    }


def _hostile_start(run: Run, seed: int, target: str, value: Any) -> None:
    with serving(run, "tiny-llama", "--untrusted", "--mode", "auto", vllm=EAGER) as one:
        if (report := answering(run, one, f"{seed} {target} {json.dumps(value)[:120]}")) is None:
            return
        log = one.log.read_text(errors="replace")
        if "verified" in json.dumps(report) or "is not trusted" not in log:
            run.fail(f"{seed} {target}: taken for more than a stranger's: {json.dumps(report)[:200]}")
        run.counts[f"ready: {target}"] += 1
        run.counts[f"mode {report['mode']}"] += 1
        run.counts["left out after a death"] += any(
            "left out" in step["reason"] for step in report["fallbacks"]
        )
        one.end()
