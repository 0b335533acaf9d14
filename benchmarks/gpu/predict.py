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
ASSUMED = "assumed"


@dataclass(frozen=True)
class Term:
    """Seconds of one step for each model, and where they come from: a result file, a publication, or an assumption."""

    step: str
    seconds: Mapping[str, float]
    source: str


def each(step: str, seconds: Iterable[float], source: str) -> Term:
    """Return a term with one value for each model, in the order of MODELS."""
    return Term(step, dict(zip(MODELS, seconds, strict=True)), source)


def divided(step: str, rates: Mapping[int, float], source: str) -> Term:
    """Return a term of the bytes of each GPU divided by its rate in GB/s, which depends on the number of GPUs."""
    return Term(step, {name: size / gpus / rates[gpus] for name, (size, gpus) in MODELS.items()}, source)


IMPORT = each("import vLLM", (11.2, 11.4, 11.4, 11.4), f"{SMALL}, {H100}: import_s")
IMPORT_UNCOLLECTED = each(
    "import vLLM, collector off", (9, 9, 9, 9), f"{ASSUMED}: 2 s of {H100}'s import are collections"
)
SPAWNED = each(
    "import vLLM again in the spawned engine", (10.5, 10.5, 10.5, 20), f"{ASSUMED}: the import once more"
)
BUILD = each(
    "device and model",
    (2.7, 2.9, 2.9, 2.9),
    f"{SMALL}, {H100}: init_device_s, load_model_s of random weights",
)
PLANNED = each(
    "worker's imports, device and model", (1.2, 1.2, 1.2, 1.2), f"{ASSUMED}: {H100}'s without collections"
)
WEIGHTS = divided("load the weights", {1: 4.8, 8: 3.75}, f"{ASSUMED}: 4.8 GB/s, 8 ranks 30 GB/s in all")
PROFILE = each("profile the memory, load compiled code", (6, 7.5, 7.5, 9), f"7B {LOGS}; others {ASSUMED}")
PROFILE_PLANNED = each("load compiled code, memory from the plan", (1.5, 1.5, 1.5, 1.5), ASSUMED)
CAPTURE = each(
    "capture all graphs", (3, 4.4, 4.6, 10), f"{ASSUMED}: 102 graphs, of which 35 take 2.1 s in {H100}"
)
CAPTURE_FULL = each(
    "capture FULL graphs only", (1.8, 2.1, 2.1, 4), f"{SMALL}, {H100}: capture_s; 8B and TP 8 {ASSUMED}"
)
WARM = each("warm up kernels", (1.5, 1.5, 1.5, 1.5), ASSUMED)
NCCL = each("connect the ranks", (0, 0, 0, 3), ASSUMED)
REST = each("application, first token", (1.5, 2, 2, 2), ASSUMED)
READY = each("other work, first token", (0.5, 0.5, 0.5, 0.5), ASSUMED)
RESTORED = (PLANNED, WEIGHTS, PROFILE_PLANNED, CAPTURE, NCCL, READY)

MODES: dict[str, tuple[Term, ...]] = {
    "plain": (IMPORT, SPAWNED, BUILD, WEIGHTS, PROFILE, CAPTURE, WARM, NCCL, REST),
    "plain-free": (IMPORT, BUILD, WEIGHTS, PROFILE_PLANNED, CAPTURE_FULL, WARM, NCCL, REST),
    "fresh": (IMPORT_UNCOLLECTED, *RESTORED),
    "template-runtime": (each("fork, open a context", (0.36, 0.36, 0.36, 0.36), f"{FORK}, H200"), *RESTORED),
    "standby": (
        divided(
            "wake the weights",
            {1: 23.0, 8: 11.5},
            f"llm-d on vLLM's sleep mode: 64 GiB in 3 s; 8 ranks {ASSUMED}",
        ),
        each("checks, first token", (0.3, 0.3, 0.3, 0.5), ASSUMED),
    ),
}


def predict(mode: str, model: str) -> float:
    """Return the predicted seconds to the first token."""
    return sum(term.seconds[model] for term in MODES[mode])


def find_measured() -> dict[str, list[float]]:
    """Return the seconds to the first token that `gpu/plan` measured on an H200, by mode, with full caches."""
    found: dict[str, list[float]] = {}
    answers: Mapping[str, Any] = (load("gpu/plan-compare-h200") or {}).get("answers", {})
    for name, answer in answers.items():
        mode, _, number = name.rpartition("-")
        if number.isdigit() and "first_token_s" in (answer.get("found") or {}):
            found.setdefault(mode, []).append(answer["found"]["first_token_s"])
    return found


def main() -> None:
    measured = find_measured()
    sums = {mode: {model: round(predict(mode, model), 2) for model in MODELS} for mode in MODES}
    print(f"| predicted s | {' | '.join(MODELS)} | measured, 7B on an H200 |\n{'|---' * (len(MODELS) + 2)}|")
    for mode, row in sums.items():
        times = ", ".join(f"{value:.1f}" for value in measured.get(mode, [])) or "not measured"
        print(f"| {mode} | {' | '.join(f'{value:.1f}' for value in row.values())} | {times} |")
    for mode, terms in MODES.items():
        print(f"\n| {mode} | {' | '.join(MODELS)} | source |\n{'|---' * (len(MODELS) + 2)}|")
        for term in terms:
            print(
                f"| {term.step} | {' | '.join(f'{value:.2f}' for value in term.seconds.values())} | {term.source} |"
            )


if __name__ == "__main__":
    main()
