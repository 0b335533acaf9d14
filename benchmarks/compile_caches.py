"""A GPU bundle's compile section on real vLLM: another cache root, another path of the model, another user, no compilation.

    python benchmarks/compile_caches.py

What a GPU start does with its bundle's compile section is done here on vLLM's CPU build: collected, published in a bundle,
unpacked, laid, found under the hash that the second engine computes. Counted by vLLM's own counters, and by a compiler in the
PATH that notes each call. The second engine runs once more as another user where root runs this (else the row says why not): in
a mount namespace of its own, where the interpreter can be reached and the user has a name. Injected misses must each have their
reason, and the same tokens.

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
WHOLE, FOREIGN = "from the bundle", "from the bundle, another user"
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
import os
said["user"] = os.getuid()
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
    argv = [sys.executable, "-P", "-c", ENGINE, str(model), str(laid or "")]
    if user is not None:
        argv = [*as_user(user, place), *argv]
    done = subprocess.run(argv, env=env, cwd=place, text=True, capture_output=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    if not said:
        raise SystemExit(f"the engine in {place} ended with {done.returncode}: {done.stderr[-3000:]}")
    compiled = [line for line in calls.read_text().splitlines() if "-o " in line]
    return json.loads(said[0].removeprefix("SAID ")) | {"files compiled by g++": len(compiled)}


def as_user(user: int, place: Path) -> list[str]:
    """What a command is put behind to run as `user`, who can reach this interpreter and this checkout and is called so.

    In a mount namespace of its own: nothing of it is seen outside.
    """
    needed = [Path(sys.base_prefix), Path(sys.prefix).resolve(), ROOT]
    shut = [one for path in needed for one in reversed(path.parents) if not one.stat().st_mode & 0o001]
    doors = {one for one in shut if not set(one.parents) & set(shut)}
    behind = [path for path in needed if doors & set(path.parents)]
    # The interpreter may stand in the checkout: what is mounted with its parent needs no mount of its own.
    behind = [path for path in dict.fromkeys(behind) if not set(behind) & set(path.parents)]
    passwd, held = place / "passwd", place / "held"
    passwd.write_text(f"{Path('/etc/passwd').read_text()}stranger:x:{user}:{user}::{place}:/bin/sh\n")
    lines = ["set -e", f"mount --bind {passwd} /etc/passwd"]
    for number, path in enumerate(behind):
        lines += [f"mkdir -p {held}/{number}", f"mount --bind {path} {held}/{number}"]
    lines += [f"mount -t tmpfs -o mode=755 none {door}" for door in sorted(doors)]
    for number, path in enumerate(behind):
        lines += [f"mkdir -p {path}", f"mount --move {held}/{number} {path}"]
    lines.append(
        f'exec setpriv --reuid {user} --regid {user} --clear-groups --inh-caps=-all --bounding-set=-all "$@"'
    )
    return ["unshare", "--mount", "sh", "-c", "\n".join(lines), "as-user"]


def no_other_user() -> str | None:
    """Why no other user can be had here, or None."""
    if os.geteuid():
        return "not run by root"
    if missing := [name for name in ("unshare", "setpriv", "mount") if shutil.which(name) is None]:
        return f"{', '.join(missing)} is not installed"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() or None


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
    for name, spoil in {WHOLE: lambda _: None, FOREIGN: lambda _: None, **MISSES}.items():
        user = STRANGER if name == FOREIGN else None
        if user and (reason := no_other_user()):
            rows[name] = {"skipped": reason}
            continue
        content = unpacked(bundle, "compile", place / f"unpacked {name}", anyone)
        laid = caches.lay(content, place / f"laid-{name.replace(' ', '-')}") / caches.AOT
        spoil(laid)
        for path in laid.parent.parent.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        rows[name] = engine(place / name.replace(" ", "-"), moved, laid, user)
    return {"section": made, "engines": rows}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="caches-") as made:
        Path(made).chmod(0o755)
        found = measure(Path(made))
    rows = found["engines"]
    ran = {name: row for name, row in rows.items() if "skipped" not in row}
    whole = [ran[name] for name in (WHOLE, FOREIGN) if name in ran]
    least = rows["vLLM's own second start"]["files compiled by g++"]
    met = {
        "0 compilations": not any(COMPILING & set(row["counted by vLLM"]) for row in whole),
        "no more C++ than vLLM's own second start": all(row["files compiled by g++"] <= least for row in whole),
        "loaded": all(row["loaded"] == 1 and row["reasons"] == [] for row in whole),
        "by another user": rows[FOREIGN].get("user") == STRANGER,
        "every miss has its reason": all(rows[name]["reasons"] and not rows[name]["loaded"] for name in MISSES),
        "tokens equal": all(row["tokens"] == rows["cold"]["tokens"] for row in ran.values()),
    }  # fmt: skip
    about = {"date": facts.today(), "command": ["python", "benchmarks/compile_caches.py"]}
    about |= {"machine": facts.machine(), "versions": facts.versions()}
    finish("compile-caches-cpu", about | {"met": met} | found)


if __name__ == "__main__":
    main()
