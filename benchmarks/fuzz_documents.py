"""Mutations of every document and plain section of a bundle, against list, inspect, validate and serve --dry-run in process.

Structure-aware: values, members and types are changed where they stand, digests are made right again. A finding is an
exception that is no refusal, a reader that takes more than 5 s, or a write outside of the sandbox; each names its seed.
Run: python benchmarks/fuzz_documents.py --mutations 20000
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tools.fuzzed import TARGETS, Fuzz, readers, writes_outside  # noqa: E402

from benchmarks.common import finish  # noqa: E402
from coldstart.key import inspection  # noqa: E402
from coldstart.machine.paths import Cache  # noqa: E402
from coldstart.measure.bench import facts  # noqa: E402


def model_in(place: Path) -> str:
    """A model directory that a key can be composed of."""
    place.mkdir()
    (place / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    (place / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return str(place)


def run(mutations: int, first: int) -> dict[str, Any]:
    """The result: counts, and every finding."""
    with tempfile.TemporaryDirectory(prefix="coldstart-fuzz-") as name:
        home = Path(name)
        for variable in (
            "HOME",
            "XDG_CACHE_HOME",
            "XDG_STATE_HOME",
            "XDG_RUNTIME_DIR",
            "COLDSTART_CACHE_DIR",
        ):
            os.environ[variable] = str(home)
        tempfile.tempdir = str(home)
        model = model_in(home / "my-model")
        key = dict(inspection.look_up(model).key.fields)
        fuzz = Fuzz(Cache.at().bundles, key, readers(model))
        fuzz.root.mkdir(parents=True)
        began = time.monotonic()
        with writes_outside(home) as strayed:
            for seed in range(first, first + mutations):
                fuzz.one(seed)
        tempfile.tempdir = None
        return {
            "mutations": mutations,
            "first_seed": first,
            "targets": list(TARGETS),
            "readers": list(fuzz.readers),
            "read": fuzz.read,
            "refused": fuzz.refused,
            "found": len(fuzz.findings),
            "written_outside": len(strayed),
            "slowest_s": round(fuzz.slowest_s, 3),
            "seconds": round(time.monotonic() - began, 1),
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            "kinds": dict(Counter(finding.what.partition(":")[0] for finding in fuzz.findings)),
            "findings": [asdict(finding) for finding in fuzz.findings[:50]],
            "strays": strayed[:50],
        }


def main() -> None:
    """Parse, fuzz, keep the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutations", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    given = parser.parse_args()
    result = run(given.mutations, given.first)
    command = ["python", "benchmarks/fuzz_documents.py", *facts.without_paths(sys.argv[1:])]
    made = {"date": facts.today(), "command": command, "machine": facts.machine()}
    finish("fuzz-documents", made | result)
    sys.exit(bool(result["found"] or result["written_outside"]))


if __name__ == "__main__":
    main()
