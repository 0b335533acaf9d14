"""Start modes of a real server on a GPU against plain vLLM, cold and warm: one JSON report.

Needs vLLM's GPU build with coldstart installed, a model directory or `--random` (0.5b or 7b), and twice the model's bytes of
free disk. Steps: doctor, materialize, `coldstart bench` of every mode that doctor reports as available. A step that fails is
recorded with the end of its log and does not stop the others. The report is written after every step.

Run: python -m benchmarks gpu/serve --model DIR | --random 0.5b [--out FILE]
Time: about 10 minutes on a GPU
Result: none committed: no GPU run yet
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHAPES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "heads": 14, "kv": 2},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "heads": 32, "kv": 32},
}
LEAST_S, ENDING_S = 20.0, 15.0


def needs(bytes_: int, place: Path) -> list[str]:
    """Return a message for each missing requirement of a run."""
    missing = []
    if shutil.which(_console()) is None:
        missing.append(
            "coldstart is not installed in this interpreter's environment: python -m pip install '.[gpu]' in the checkout"
        )
    free = shutil.disk_usage(place).free
    if free < 2 * bytes_:
        missing.append(
            f"{2 * bytes_ / 1e9:.0f} GB are needed in {place}, {free / 1e9:.0f} GB are free: --work DIR"
        )
    return missing


def _console() -> str:
    return str(Path(sys.executable).with_name("coldstart"))


def random_model(name: str, place: Path) -> Path:
    """A Llama of that shape with seeded random weights in bf16, one layer at a time."""
    import torch
    from safetensors.torch import save_file

    s, target = SHAPES[name], place / f"random-{name}"
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    width, inner, vocabulary = s["hidden_size"], s["intermediate_size"], 32000
    kv, source = width // s["heads"] * s["kv"], torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=source) * shape[-1] ** -0.5).bfloat16()

    for i in range(s["num_hidden_layers"]):
        name_ = f"model.layers.{i}"
        layer = {
            f"{name_}.self_attn.q_proj.weight": matrix(width, width), f"{name_}.self_attn.k_proj.weight": matrix(kv, width),
            f"{name_}.self_attn.v_proj.weight": matrix(kv, width), f"{name_}.self_attn.o_proj.weight": matrix(width, width),
            f"{name_}.mlp.gate_proj.weight": matrix(inner, width), f"{name_}.mlp.up_proj.weight": matrix(inner, width),
            f"{name_}.mlp.down_proj.weight": matrix(width, inner),
            f"{name_}.input_layernorm.weight": torch.ones(width).bfloat16(),
            f"{name_}.post_attention_layernorm.weight": torch.ones(width).bfloat16(),
        }  # fmt: skip
        save_file(layer, target / f"model-{i:05}.safetensors")
    ends = {"model.embed_tokens.weight": matrix(vocabulary, width), "lm_head.weight": matrix(vocabulary, width),
            "model.norm.weight": torch.ones(width).bfloat16()}  # fmt: skip
    save_file(ends, target / "model-ends.safetensors")
    _index(target)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": vocabulary,
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": s["num_hidden_layers"],
        "num_attention_heads": s["heads"], "num_key_value_heads": s["kv"], "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    return target


def _index(target: Path) -> None:
    from safetensors import safe_open

    where: dict[str, str] = {}
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, "pt") as held:
            where |= dict.fromkeys(held.keys(), file.name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def _ended(argv: list[str], environment: dict[str, str], left: float) -> subprocess.CompletedProcess[str]:
    """Run a command like subprocess.run, but end it with a signal at its timeout, so that it can stop its processes."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=environment)
    try:
        output, errors = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.communicate(timeout=ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    return subprocess.CompletedProcess(argv, process.returncode, output, errors)


@dataclass
class Run:
    """Sequence of steps that share a time limit; `report` is written after each."""

    out: Path | None
    end: float
    work: Path
    report: dict[str, Any] = field(default_factory=lambda: {"steps": []})

    def step(self, name: str, *arguments: str, result: Path | None = None) -> Any:
        """One coldstart command; its JSON, or None with the reason in the report."""
        left, start = self.end - time.monotonic(), time.monotonic()
        row: dict[str, Any] = {"step": name, "command": ["coldstart", *arguments], "ok": False}
        self.report["steps"].append(row)
        try:
            if left < LEAST_S:
                raise TimeoutError("no time was left")
            environment = os.environ | {"COLDSTART_CACHE_DIR": str(self.work / "cache")}
            done = _ended([_console(), *arguments], environment, left)
            text = result.read_text() if result and result.exists() else done.stdout
            row |= {"exit": done.returncode, "result": json.loads(text)}
            row["ok"] = done.returncode == 0
            if not row["ok"]:
                row["end"] = done.stderr[-2000:]
        except (OSError, ValueError, IndexError, subprocess.TimeoutExpired, TimeoutError) as error:
            row["error"] = f"{type(error).__name__}: {error}"[-2000:]
        row["seconds"] = round(time.monotonic() - start, 1)
        self.write()
        return row.get("result")

    def write(self) -> None:
        """Write the current report."""
        if self.out:
            self.out.write_text(json.dumps(self.report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a directory, an alias or a repository")
    parser.add_argument("--random", choices=SHAPES, help="make a model with random weights")
    parser.add_argument("--work", type=Path, default=Path("build/serve-gpu"))
    parser.add_argument("--minutes", type=float, default=9.8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("vllm_args", nargs="*", help="after --")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    options.work.mkdir(parents=True, exist_ok=True)
    wanted = {"0.5b": 1_000_000_000, "7b": 14_000_000_000}.get(options.random or "", 0)
    if missing := needs(wanted, options.work):
        sys.exit("; ".join(missing))
    run = Run(options.out, end, options.work.resolve())
    model = str(random_model(options.random, run.work)) if options.random else options.model or "tiny-llama"
    passed = ["--", *options.vllm_args] if options.vllm_args else []
    if options.random:
        passed = [*(passed or ["--"]), "--skip-tokenizer-init"]
    run.report |= {
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": model,
    }
    run.step("doctor", "doctor", "--format", "json")
    run.step("materialize", "materialize", model, "--format", "json", *passed)
    exported = run.work / "bench.json"
    run.step(
        "bench",
        "bench",
        model,
        "--runs",
        str(options.runs),
        "--export",
        f"json={exported}",
        *passed,
        result=exported,
    )
    run.write()
    print(json.dumps({row["step"]: row["ok"] for row in run.report["steps"]}))
    sys.exit(0 if all(row["ok"] for row in run.report["steps"]) else 1)


if __name__ == "__main__":
    main()
