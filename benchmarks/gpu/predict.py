"""Predicted seconds to the first token on one H100, by start mode and model, with the source of each term.

A prediction is the sum of its terms, so a measured start can refute each of them alone. Figures of `gpu/plan` stand beside the
sums. They come from another GPU (H200), so a difference is a question and no error of a few percent.

Run: python -m benchmarks gpu/predict
Time: 1 s
Result: none; prints the tables
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common import load

# Weights in bf16 in GB, and the GPUs among which they are divided.
MODELS = {"0.5B": (0.99, 1), "7B": (13.5, 1), "8B": (16.4, 1), "70B, TP 8": (141.0, 8)}
H100 = "gpu/engine-llama2-7b-h100.json"
SMALL = "gpu/engine-qwen2-0.5b-all-sizes-h200.json"
FORK = "gpu/plan-fork-h200.json"
LOGS = "gpu/plan-logs-h200.txt"
CHECKPOINT = "gpu/checkpoint-h200"
ASSUMED = "assumed"


@dataclass(frozen=True)
class Term:
    """Seconds of one step for each model of MODELS, and where they come from: a result, a publication, or an assumption."""

    step: str
    seconds: tuple[float, ...]
    source: str


def divided(step: str, rates: Mapping[int, float], source: str) -> Term:
    """Return a term of the bytes of each GPU divided by its rate in GB/s, which depends on the number of GPUs."""
    return Term(step, tuple(size / gpus / rates[gpus] for size, gpus in MODELS.values()), source)


def fit_restore(held_gib: float) -> Term:
    """Return the term in which the driver restores what a sleeping engine holds, in GiB, from restores of two sizes."""
    rows = [
        (case["gib"], sum(s["seconds"] for s in case["steps"] if s["step"] in ("restore", "unlock")))
        for case in (load(CHECKPOINT) or {})["cases"][:2]
    ]
    (small, fast), (large, slow) = rows
    seconds = fast + (slow - fast) / (large - small) * (held_gib - small)
    source = f"{CHECKPOINT}.json, H200: 1 and 8 GiB; {held_gib} GiB in gpu/plan-compare-h200.json; others {ASSUMED}"
    return Term("restore the device", (seconds,) * len(MODELS), source)


# fmt: off
RESTORED = (
    Term("worker's imports, device and model", (1.2, 1.2, 1.2, 1.2), f"{ASSUMED}: {H100}'s without collections"),
    WEIGHTS := divided("load the weights", {1: 4.8, 8: 3.75}, f"{ASSUMED}: 4.8 GB/s, 8 ranks 30 GB/s in all"),
    PLANNED := Term("load compiled code, memory from the plan", (1.5, 1.5, 1.5, 1.5), ASSUMED),
    CAPTURE := Term("capture all graphs", (3, 4.4, 4.6, 10), f"{ASSUMED}: 102 graphs, of which 35 take 2.1 s in {H100}"),
    NCCL := Term("connect the ranks", (0, 0, 0, 3), ASSUMED),
    Term("other work, first token", (0.5, 0.5, 0.5, 0.5), ASSUMED),
)
IMPORT = Term("import vLLM", (11.2, 11.4, 11.4, 11.4), f"{SMALL}, {H100}: import_s")
BUILD = Term("device and model", (2.7, 2.9, 2.9, 2.9), f"{SMALL}, {H100}: init_device_s, load_model_s of random weights")
WARM = Term("warm up kernels", (1.5, 1.5, 1.5, 1.5), ASSUMED)
REST = Term("application, first token", (1.5, 2, 2, 2), ASSUMED)
MODES: dict[str, tuple[Term, ...]] = {
    "plain": (
        IMPORT, Term("import vLLM again in the spawned engine", (10.5, 10.5, 10.5, 20), f"{ASSUMED}: the import once more"),
        BUILD, WEIGHTS, Term("profile the memory, load compiled code", (6, 7.5, 7.5, 9), f"7B {LOGS}; others {ASSUMED}"),
        CAPTURE, WARM, NCCL, REST,
    ),
    "plain-free": (
        IMPORT, BUILD, WEIGHTS, PLANNED,
        Term("capture FULL graphs only", (1.8, 2.1, 2.1, 4), f"{SMALL}, {H100}: capture_s; 8B and TP 8 {ASSUMED}"),
        WARM, NCCL, REST,
    ),
    "fresh": (
        Term("import vLLM, collector off", (9, 9, 9, 9), f"{ASSUMED}: 2 s of {H100}'s import are collections"), *RESTORED,
    ),
    "template-runtime": (Term("fork, open a context", (0.36, 0.36, 0.36, 0.36), f"{FORK}, H200"), *RESTORED),
    "standby": (
        divided("wake the weights", {1: 23.0, 8: 11.5}, f"llm-d on vLLM's sleep mode: 64 GiB in 3 s; 8 ranks {ASSUMED}"),
        Term("checks, first token", (0.3, 0.3, 0.3, 0.5), ASSUMED),
    ),
}
# fmt: on
MODES["parked"] = (fit_restore(1.5), *MODES["standby"])


def find_measured() -> dict[str, list[float]]:
    """Return the seconds to the first token that `gpu/plan` measured on an H200, by mode, with full caches."""
    found: dict[str, list[float]] = {}
    answers: Mapping[str, Any] = (load("gpu/plan-compare-h200") or {}).get("answers", {})
    for name, answer in answers.items():
        mode, _, number = name.rpartition("-")
        if number.isdigit() and "first_token_s" in (answer.get("found") or {}):
            found.setdefault(mode, []).append(answer["found"]["first_token_s"])
    return found


def row(first: str, seconds: Iterable[float], places: int, last: str) -> str:
    """Return a row of a Markdown table."""
    return f"| {first} | {' | '.join(f'{value:.{places}f}' for value in seconds)} | {last} |"


def main() -> None:
    measured, rule = find_measured(), "|---" * (len(MODELS) + 2)
    print(f"| predicted s | {' | '.join(MODELS)} | measured, 7B on an H200 |\n{rule}|")
    for mode, terms in MODES.items():
        times = ", ".join(f"{value:.1f}" for value in measured.get(mode, [])) or "not measured"
        print(row(mode, map(sum, zip(*(term.seconds for term in terms), strict=True)), 1, times))
    for mode, terms in MODES.items():
        print(f"\n| {mode} | {' | '.join(MODELS)} | source |\n{rule}|")
        for term in terms:
            print(row(term.step, term.seconds, 2, term.source))


if __name__ == "__main__":
    main()
