"""Predicted seconds to the first token on H100s, by start mode and model, with the source of each term.

A prediction is the sum of its terms, so a measured start can refute each of them alone. Figures of `gpu/plan` stand beside the
sums. They come from another GPU (H200) and a 7B shape, so a difference is a question and no error of a few percent.

Run: python -m benchmarks gpu/predict
Time: 1 s
Result: none; prints the tables
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.common import load

H100, SMALL = "gpu/engine-llama2-7b-h100.json", "gpu/engine-qwen2-0.5b-all-sizes-h200.json"
MEASURED, CHECKPOINT, FORK = "gpu/plan-compare-h200", "gpu/checkpoint-h200", "gpu/plan-fork-h200.json, H200"
ASSUMED = "assumed"
PARALLEL = f"{ASSUMED}: 9 to 12 processes import in 19.6 to 22.6 s at once (parallel_imports_s in {H100})"
LAYERS = f"{ASSUMED}: in proportion to the layers,"
BENCHMARK = "benchmark of InstantTensor 0.1.4 on H200s, from memory:"
LOADER = f"{BENCHMARK} vLLM's loader 4.8 GB/s, 30 GB/s by eight GPUs together"
INSTANT = f"{BENCHMARK} 48.5 GB/s, 56.9 GB/s by eight GPUs together"


class Model(NamedTuple):
    """What decides the times of a model: gigabytes of weights on each GPU, decoder layers, and GPUs (ranks)."""

    weights_gb: float
    layers: int
    ranks: int = 1


class Term(NamedTuple):
    """Seconds of one step, and where they come from: a result, a publication, or an assumption."""

    step: str
    seconds: float
    source: str


MODELS = {
    "0.5B": Model(0.99, 24),
    "7B": Model(13.5, 32),
    "8B": Model(16.1, 32),
    "70B TP 8": Model(17.6, 80, ranks=8),
}


def fit_restore(held_gib: float) -> Term:
    """Return the term in which the driver restores what a sleeping engine holds, in GiB, from restores of two sizes."""
    (small, fast), (large, slow) = (
        (case["gib"], sum(s["seconds"] for s in case["steps"] if s["step"] in ("restore", "unlock")))
        for case in load(CHECKPOINT)["cases"][:2]
    )
    seconds = fast + (slow - fast) / (large - small) * (held_gib - small)
    source = f"{CHECKPOINT}.json, H200: 1 and 8 GiB; {held_gib} GiB in gpu/plan-compare-h200.json"
    return Term("restore the device", seconds, source)


def predict(model: Model) -> dict[str, tuple[Term, ...]]:
    """Return the terms of each start mode for the model. "deferred" is the option `--capture deferred`."""
    gb, depth, parallel = model.weights_gb, model.layers / 32, model.ranks > 1
    loader, instant = (rate / model.ranks for rate in (30.0, 56.9)) if parallel else (4.8, 48.5)
    load_slow = Term("load the weights", gb / loader, LOADER)
    load_fast = Term("load the weights", gb / instant, INSTANT)
    collectives = (Term("open the collectives", 2.5, ASSUMED),) if parallel else ()
    graphs = f"{LAYERS} 102 graphs of 51 sizes, of which 35 take 2.1 s in {H100}"
    capture = Term("capture all graphs", 4.4 * depth, graphs)
    deferred = Term("capture five sizes", 4.4 * depth * 5 / 51, graphs)
    planned = Term("load compiled code, memory from the plan", 1.5, ASSUMED)
    worker = Term("worker's imports, device and model", 1.2, f"{ASSUMED}: {H100}'s without collections")
    last = Term("other work, first token", 0.5, ASSUMED)
    restored = (worker, *collectives, load_fast, planned)
    imports = Term("import vLLM", 11.4, f"{SMALL}, {H100}: import_s")
    build = Term("device and model", 2.9, f"{SMALL}, {H100}: init_device_s, load_model_s of random weights")
    rest = (Term("warm up kernels", 1.5, ASSUMED), Term("application, first token", 2.0, ASSUMED))
    again = (20.0, PARALLEL) if parallel else (10.5, f"{ASSUMED}: the import once more")
    spawned = Term("import vLLM again in spawned processes", *again)
    profile = Term("profile the memory, load compiled code", 7.5, "gpu/plan-logs-h200.txt")
    full_only = Term("capture FULL graphs only", 2.1 * depth, f"{LAYERS} {H100}: capture_s")
    fresh = Term("import vLLM, collector off", 9.0, f"{ASSUMED}: 2 s of {H100}'s are collections")
    fork = Term("fork, open a context", 0.36, FORK)
    # The backend copies from one pinned arena, and compares a digest of each tensor that it computes on the device.
    wake = Term("copy the weights back", gb / instant, f"{ASSUMED}: as fast as InstantTensor; {INSTANT}")
    digests = Term("compare their digests", gb / 1000, f"{ASSUMED}: 1 TB/s, a third of the memory's rate")
    awake = (wake, digests, Term("checks, first token", 0.3, ASSUMED))
    return {
        "plain": (imports, spawned, build, *collectives, load_slow, profile, capture, *rest),
        "plain-free": (imports, build, *collectives, load_fast, planned, full_only, *rest),
        "fresh": (fresh, *restored, capture, last),
        "fresh, deferred": (fresh, *restored, deferred, last),
        "template-runtime": (fork, *restored, capture, last),
        "template-runtime, deferred": (fork, *restored, deferred, last),
        "standby": awake,
        "parked": (fit_restore(1.5), *awake),
    }


def find_measured(result: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the seconds to the first token in a result of `gpu/plan compare`, by mode, with full caches."""
    found: dict[str, list[float]] = {}
    for name, answer in result["answers"].items():
        mode, _, number = name.rpartition("-")
        if number.isdigit() and "first_token_s" in (answer.get("found") or {}):
            found.setdefault(mode, []).append(answer["found"]["first_token_s"])
    return found


def add_up(terms: tuple[Term, ...]) -> str:
    """Return the sum of the terms as text, with no more digits than a prediction deserves."""
    seconds = sum(term.seconds for term in terms)
    return f"{seconds:.{0 if seconds > 9.9 else 1}f} s"


def format_header(first: str, last: str) -> str:
    """Return the first two lines of a Markdown table with a column for each model between two others."""
    return f"| {first} | {' | '.join(MODELS)} | {last} |\n{'|---' * (len(MODELS) + 2)}|"


def tabulate() -> str:
    """Return the predicted seconds of each mode and model beside the measured ones, as a Markdown table."""
    measured, predicted = find_measured(load(MEASURED)), [predict(model) for model in MODELS.values()]
    lines = [format_header("mode", "7B, measured on an H200")]
    for mode in predicted[0]:
        sums = " | ".join(add_up(terms[mode]) for terms in predicted)
        times = ", ".join(f"{value:.1f} s" for value in measured.get(mode, [])) or "not measured"
        lines.append(f"| {mode} | {sums} | {times} |")
    return "\n".join(lines)


def main() -> None:
    print(tabulate())
    predicted = [predict(model) for model in MODELS.values()]
    for mode in predicted[0]:
        print(f"\n{format_header(mode, 'source')}")
        for step in dict.fromkeys(term.step for terms in predicted for term in terms[mode]):
            found = [next((term for term in terms[mode] if term.step == step), None) for terms in predicted]
            seconds = " | ".join(f"{term.seconds:.2f}" if term else "none" for term in found)
            sources = "; ".join(dict.fromkeys(term.source for term in found if term))
            print(f"| {step} | {seconds} | {sources} |")


if __name__ == "__main__":
    main()
