"""A GPU bundle's compile section on real vLLM: another cache root, another path of the model, another user, no compilation.

    python benchmarks/compile_caches.py

What a GPU start does with its bundle's compile section is done here on vLLM's CPU build: collected, published in a bundle,
unpacked, laid, found under the hash that the second engine computes. Counted by vLLM's own counters, and by a compiler in the
PATH that notes each call. The second engine runs as another user where there may be one (`user` in the result). Injected misses
must each have their reason, and the same tokens.

vLLM's CPU platform turns its own compiler backend off (it traces once with Inductor instead, and its artefact of that cannot
be loaded by vLLM itself), so the engines here get it back as on a GPU: mode and backend as asked, no sizes to capture, and
without the pass that names operators of GPUs. All else is vLLM's. Nothing of Triton's, FlashInfer's or DeepGEMM's is made on
a CPU: those caches are not shown here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from coldstart.artifacts.bundle import anyone  # noqa: E402
from coldstart.artifacts.store import Store  # noqa: E402
from tools.bundles import key, provenance  # noqa: E402

from benchmarks.common import finish  # noqa: E402
from coldstart.machine.paths import Cache  # noqa: E402
from coldstart.machine.unpacked import unpacked  # noqa: E402
from coldstart.measure.bench import facts  # noqa: E402
from coldstart.model import models  # noqa: E402
from coldstart.serve import caches, prepare  # noqa: E402

STRANGER = 64321
Row = dict[str, Any]
COMPILING = {"num_aot_compiles", "num_backend_compilations", "num_inductor_compiles", "num_graphs_seen"}
ENGINE = """
import dataclasses, json, sys
from pathlib import Path
from coldstart.vllm import late
from vllm.platforms.cpu import CpuPlatform
checked = CpuPlatform.check_and_update_config.__func__
def as_on_a_gpu(cls, config):
    asked = config.compilation_config
    mode, backend = asked.mode, asked.backend
    checked(cls, config)
    asked.mode, asked.backend, asked.compile_sizes = mode, backend, []
CpuPlatform.check_and_update_config = classmethod(as_on_a_gpu)
def without(module):
    module.FixFunctionalizationPass.__call__ = lambda self, graph: None
late.when_imported("vllm.compilation.passes.utility.fix_functionalization", without)
held = None
if sys.argv[2]:
    from coldstart.vllm.engine import aot
    held = aot.Aot(Path(sys.argv[2]))
    late.when_imported(aot.MODULE, held.install)
from vllm import LLM, SamplingParams
from vllm.compilation.counter import compilation_counter
engine = LLM(sys.argv[1], max_model_len=512, kv_cache_memory_bytes=1 << 27, seed=0)
(answer,) = engine.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=16))
counted = {name: count for name, count in dataclasses.asdict(compilation_counter).items() if count}
said = {"tokens": list(answer.outputs[0].token_ids), "counted by vLLM": counted}
print("SAID " + json.dumps(said | ({"loaded": held.loaded, "reasons": held.reasons} if held else {})))
"""


def engine(
    place: Path, model: Path, laid: Path | None = None, user: int | None = None, root: Path | None = None
) -> Row:
    """What an engine with the cache root `root` (else one of its own) says, and how often it called the C++ compiler."""
    programs, calls = place / "bin", place / "calls"
    programs.mkdir(parents=True)
    calls.touch()
    compiler = shutil.which("g++")
    (programs / "g++").write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {compiler} "$@"\n')
    (programs / "g++").chmod(0o755)
    own = {
        "HOME": place,
        "XDG_CACHE_HOME": place / "cache",
        "VLLM_CACHE_ROOT": root or place / "vllm",
        "TMPDIR": place,
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "TORCH"))}
    env = kept | {name: str(value) for name, value in own.items()}
    env |= {
        "PATH": f"{programs}:{kept['PATH']}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    # As in every start of ours on a processor: no compiler is asked what the processor can do.
    isa = {
        name: value
        for name, value in prepare.inductor_env(place).items()
        if name != "TORCHINDUCTOR_CACHE_DIR"
    }
    env |= {"HF_HUB_OFFLINE": "1"} | isa | (caches.environment(laid.parent) if laid else {})
    if user is not None:
        for path in (place, *place.rglob("*")):
            os.chown(path, user, user)
    done = subprocess.run(
        [sys.executable, "-P", "-c", ENGINE, str(model), str(laid or "")],
        env=env, cwd=place, user=user, group=user, extra_groups=None if user is None else [], text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    if not said:
        raise SystemExit(f"the engine in {place} ended with {done.returncode}: {done.stderr[-3000:]}")
    compiled = [line for line in calls.read_text().splitlines() if "-o " in line]
    return json.loads(said[0].removeprefix("SAID ")) | {"files compiled by g++": len(compiled)}


def may_run(user: int) -> bool:
    """Whether another user can be had here, and may run this interpreter."""
    try:
        return not subprocess.run([sys.executable, "-c", ""], user=user, check=False).returncode
    except PermissionError:
        return False


def truncated(aot: Path) -> None:
    """Half an artefact."""
    for artefact in aot.glob("*/rank_*/model"):
        os.truncate(artefact, artefact.stat().st_size // 2)


def of_another_rank(aot: Path) -> None:
    """An artefact, but for a rank that this engine does not have."""
    for rank in aot.glob("*/rank_0_0"):
        rank.rename(rank.with_name("rank_7_0"))


MISSES: dict[str, Callable[[Path], None]] = {"truncated": truncated, "of another rank": of_another_rank}


def measure(place: Path) -> Row:
    """Cold, from the bundle, and with each injected miss."""
    model = models.ensure_weights(models.resolve("tiny-llama", cache=Cache(place))).path
    assert model is not None
    cold = engine(place / "cold", model)
    warm = engine(place / "warm", model, root=place / "cold" / "vllm")
    section = place / "section"
    made = caches.collect(place / "none", place / "cold" / "vllm", section)
    with Store(place / "bundles").begin(key()) as draft:
        draft.add_tree("compile", section)
        bundle = draft.publish(provenance())
    for gone in (section, place / "cold"):
        shutil.rmtree(gone)  # whatever is found is found in the bundle
    moved = place / "elsewhere" / "another-name"
    shutil.copytree(model, moved)
    rows: Row = {"cold": cold, "vLLM's own second start": warm}
    user = STRANGER if may_run(STRANGER) else None
    for name, spoil in {"from the bundle": lambda _: None, **MISSES}.items():
        content = unpacked(bundle, "compile", place / f"unpacked {name}", anyone)
        laid = caches.lay(content, place / f"laid-{name.replace(' ', '-')}") / caches.AOT
        spoil(laid)
        for path in laid.parent.parent.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        rows[name] = engine(place / name.replace(" ", "-"), moved, laid, user)
    return {"section": made, "user": user, "engines": rows}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="caches-") as made:
        Path(made).chmod(0o755)
        found = measure(Path(made))
    rows = found["engines"]
    whole = rows["from the bundle"]
    met = {
        "0 compilations": not COMPILING & set(whole["counted by vLLM"]),
        "no more C++ than vLLM's own second start": whole["files compiled by g++"]
        <= rows["vLLM's own second start"]["files compiled by g++"],
        "loaded": whole["loaded"] == 1 and whole["reasons"] == [],
        "every miss has its reason": all(rows[name]["reasons"] and not rows[name]["loaded"] for name in MISSES),
        "tokens equal": all(row["tokens"] == rows["cold"]["tokens"] for row in rows.values()),
    }  # fmt: skip
    about = {"date": facts.today(), "command": ["python", "benchmarks/compile_caches.py"]}
    about |= {"machine": facts.machine(), "versions": facts.versions()}
    finish("compile-caches-cpu", about | {"met": met} | found)


if __name__ == "__main__":
    main()
