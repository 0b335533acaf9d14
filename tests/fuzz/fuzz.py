"""Search inputs that break a target, guided by coverage, with the options of libFuzzer: `make fuzz` runs this.

python fuzz.py TARGET [-max_total_time=SECONDS] [CORPUS ...]
"""

import logging
import sys
from pathlib import Path

try:
    import atheris
except ModuleNotFoundError:
    sys.exit(
        "error: cannot fuzz: atheris is not installed\nhint: make fuzz, on x86-64 with Python 3.11 to 3.13"
    )

TESTS = Path(__file__).parents[1]
FOUND = TESTS.parent / "build/fuzz"
LIMITS = ("-timeout=10", "-rss_limit_mb=2048")
sys.path[:0] = [str(TESTS)]
with atheris.instrument_imports(include=["coldstart", "support.fuzz_targets", "json"]):
    from support.fuzz_targets import TARGETS


def main() -> None:
    """Fuzz the target that the first argument names."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        sys.exit(f"error: cannot fuzz {name!r}: no such target\nhint: use one of {', '.join(TARGETS)}")
    logging.disable()
    (FOUND / name).mkdir(parents=True, exist_ok=True)
    places = (f"-artifact_prefix={FOUND / name}-", str(FOUND / name), str(TESTS / "fuzz/corpus" / name))
    atheris.Setup([*sys.argv, *LIMITS, *places], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
