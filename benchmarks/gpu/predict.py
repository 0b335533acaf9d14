"""Predicted seconds to the first token of a 7B model on one H100, by start mode, with the source of each term.

A prediction is the sum of its terms, so a measured start can refute each of them alone. Figures of `gpu/plan` stand beside the
sums. They come from another GPU (H200), so a difference is a question and no error of a few percent.

Run: python -m benchmarks gpu/predict
Time: 1 s
Result: none; prints the tables
"""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.common import load

WEIGHTS_GB = 13.5
H100, SMALL = "gpu/engine-llama2-7b-h100.json", "gpu/engine-qwen2-0.5b-all-sizes-h200.json"
CHECKPOINT, ASSUMED = "gpu/checkpoint-h200", "assumed"


class Term(NamedTuple):
    """Seconds of one step, and where they come from: a result, a publication, or an assumption."""

    step: str
    seconds: float
    source: str


def fit_restore(held_gib: float) -> Term:
    """Return the term in which the driver restores what a sleeping engine holds, in GiB, from restores of two sizes."""
    (small, fast), (large, slow) = (
        (case["gib"], sum(s["seconds"] for s in case["steps"] if s["step"] in ("restore", "unlock")))
        for case in load(CHECKPOINT)["cases"][:2]
    )
    seconds = fast + (slow - fast) / (large - small) * (held_gib - small)
    source = f"{CHECKPOINT}.json, H200: 1 and 8 GiB; {held_gib} GiB in gpu/plan-compare-h200.json"
    return Term("restore the device", seconds, source)


RESTORED = (
    Term("worker's imports, device and model", 1.2, f"{ASSUMED}: {H100}'s without collections"),
    LOAD := Term("load the weights", WEIGHTS_GB / 4.8, f"{ASSUMED}: 4.8 GB/s"),
    PLANNED := Term("load compiled code, memory from the plan", 1.5, ASSUMED),
    CAPTURE := Term("capture all graphs", 4.4, f"{ASSUMED}: 102 graphs, of which 35 take 2.1 s in {H100}"),
    Term("other work, first token", 0.5, ASSUMED),
)
IMPORT = Term("import vLLM", 11.4, f"{SMALL}, {H100}: import_s")
BUILD = Term("device and model", 2.9, f"{SMALL}, {H100}: init_device_s, load_model_s of random weights")
REST = (Term("warm up kernels", 1.5, ASSUMED), Term("application, first token", 2.0, ASSUMED))
AGAIN = Term("import vLLM again in the spawned engine", 10.5, f"{ASSUMED}: the import once more")
PROFILE = Term("profile the memory, load compiled code", 7.5, "gpu/plan-logs-h200.txt")
FULL_ONLY = Term("capture FULL graphs only", 2.1, f"{SMALL}, {H100}: capture_s")
UNCOLLECTED = Term("import vLLM, collector off", 9.0, f"{ASSUMED}: 2 s of {H100}'s import are collections")
FORK = Term("fork, open a context", 0.36, "gpu/plan-fork-h200.json, H200")
WAKE = Term("wake the weights", WEIGHTS_GB / 23.0, "llm-d on vLLM's sleep mode: 64 GiB in 3 s")
CHECKS = Term("checks, first token", 0.3, ASSUMED)
MODES = {
    "plain": (IMPORT, AGAIN, BUILD, LOAD, PROFILE, CAPTURE, *REST),
    "plain-free": (IMPORT, BUILD, LOAD, PLANNED, FULL_ONLY, *REST),
    "fresh": (UNCOLLECTED, *RESTORED),
    "template-runtime": (FORK, *RESTORED),
    "standby": (WAKE, CHECKS),
    "parked": (fit_restore(1.5), WAKE, CHECKS),
}


def find_measured() -> dict[str, list[float]]:
    """Return the seconds to the first token that `gpu/plan` measured on an H200, by mode, with full caches."""
    found: dict[str, list[float]] = {}
    answers: dict[str, Any] = (load("gpu/plan-compare-h200") or {}).get("answers", {})
    for name, answer in answers.items():
        mode, _, number = name.rpartition("-")
        if number.isdigit() and "first_token_s" in (answer.get("found") or {}):
            found.setdefault(mode, []).append(answer["found"]["first_token_s"])
    return found


def main() -> None:
    measured = find_measured()
    print("| mode | predicted s | measured on an H200 |\n|---|---|---|")
    for mode, terms in MODES.items():
        times = ", ".join(f"{value:.1f}" for value in measured.get(mode, [])) or "not measured"
        print(f"| {mode} | {sum(term.seconds for term in terms):.1f} | {times} |")
    for mode, terms in MODES.items():
        print(f"\n| {mode} | s | source |\n|---|---|---|")
        print("\n".join(f"| {term.step} | {term.seconds:.2f} | {term.source} |" for term in terms))


if __name__ == "__main__":
    main()
