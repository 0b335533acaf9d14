"""Examples of each command, which its help shows.

All examples are in one table, so that reading them imports no command module. A test parses each example.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# For small machines: tiny-llama accepts 2048 tokens, and vLLM would use most of the memory for its KV cache by default.
_TINY = "--max-model-len 1024 --kv-cache-memory-bytes 268435456"
# Keys are the command and its subcommand.
EXAMPLES: Mapping[str, Sequence[str]] = {
    "up": (
        f"coldstart up tiny-llama -- {_TINY}",
        "coldstart up ./my-model --detach --port 8001",
    ),
    "down": ("coldstart down", "coldstart down tiny-llama --keep-template"),
    "materialize": (
        f"coldstart materialize tiny-llama -- {_TINY}",
        "coldstart materialize ./my-model --snapshot",
    ),
    "serve": (
        f"coldstart serve tiny-llama -- {_TINY}",
        "coldstart serve llama2-7b --port 8001 --on-miss warn",
        "coldstart serve llama2-7b --scheduler skip-join-mlfq --alpha 1",
    ),
    "host run": (
        "coldstart host tiny-llama tiny-qwen2 --memory 2GiB --max-residents 1",
        "coldstart host --host-file /etc/coldstart/host.toml",
    ),
    "host load": ("coldstart host load tiny-llama", "coldstart host load tiny-llama --no-wait"),
    "host unload": ("coldstart host unload tiny-llama", "coldstart host unload --format json"),
    "host logs": ("coldstart host logs tiny-llama", "coldstart host logs tiny-llama --follow"),
    "host reload": ("coldstart host reload", "coldstart host reload --url http://127.0.0.1:8001"),
    "host stop": ("coldstart host stop", "coldstart host stop --url https://gpu.example --api-key-file key"),
    "host status": ("coldstart host status", "coldstart host status --format json"),
    "template start": (
        f"coldstart template start tiny-llama -- {_TINY}",
        "coldstart template start tiny-llama --level runtime",
    ),
    "template status": ("coldstart template status", "coldstart template status --format json"),
    "template freeze": ("coldstart template freeze", "coldstart template freeze --force"),
    "template discard": ("coldstart template discard", "coldstart template discard --format json"),
    "template stop": ("coldstart template stop", "coldstart template stop --level engine --force"),
    "prefetch start": (
        "coldstart prefetch start llama2-7b",
        "coldstart prefetch start llama2-7b --weights-from s3://models/llama2-7b",
    ),
    "prefetch status": ("coldstart prefetch status", "coldstart prefetch status --format json"),
    "prefetch stop": ("coldstart prefetch stop", "coldstart prefetch stop --quiet"),
    "inspect": (
        "coldstart inspect tiny-llama",
        f"coldstart inspect tiny-llama --key -- {_TINY}",
        "coldstart inspect tiny-llama:v2 --diff tiny-llama:v1",
    ),
    "list": ("coldstart list", "coldstart list --format json"),
    "prune": ("coldstart prune --dry-run", "coldstart prune --keep 2"),
    "export": ("coldstart export tiny-llama", "coldstart export tiny-llama --to tiny-llama.tar"),
    "import": ("coldstart import tiny-llama.tar", "coldstart import tiny-llama.tar --format json"),
    "push": (
        "coldstart push tiny-llama oci://registry.example.com/llm/tiny-llama:v1",
        "coldstart push tiny-llama /mnt/bundles",
    ),
    "pull": (
        "coldstart pull oci://registry.example.com/llm/tiny-llama:v1",
        "coldstart pull /mnt/bundles",
    ),
    "validate": (
        "coldstart validate tiny-llama",
        f"coldstart validate tiny-llama --level replay -- {_TINY}",
        "coldstart validate my-model --level load --model ./my-model",
    ),
    "bench": (
        "coldstart bench tiny-llama --runs 7 --export html=bench.html",
        "coldstart bench tiny-llama --modes fresh --baseline before.json",
    ),
    "trust list": ("coldstart trust list", "coldstart trust list --format json"),
    "trust add": ("coldstart trust add publisher.pem", "coldstart trust add publisher.pem --name build-farm"),
    "trust remove": ("coldstart trust remove build-farm", "coldstart trust remove 0123456789ab"),
    "trust show": ("coldstart trust show", "coldstart trust show --output publisher.pem"),
    "trust why": ("coldstart trust why tiny-llama", "coldstart trust why tiny-llama:v2 --format json"),
    "trace-replay": (
        "coldstart trace-replay trace.jsonl --target http://127.0.0.1:8000 --rate 2",
        "coldstart trace-replay trace.jsonl --simulate --profile tiny-llama --slo ttft=2,tpot=0.1",
        "coldstart trace-replay trace.jsonl --simulate --profile tiny-llama --scheduler fcfs --scheduler deadline",
    ),
    "fleet up": (
        "coldstart fleet up",
        "coldstart fleet up --host 0.0.0.0 --api-key-file key --devices 4 --memory 60GiB",
    ),
    "fleet join": ("coldstart fleet join", "coldstart fleet join head.example.com:6379 --devices 4"),
    "fleet deploy": (
        f"coldstart fleet deploy tiny-llama -- {_TINY}",
        "coldstart fleet deploy llama2-7b --name llama --slo ttft=2",
    ),
    "fleet status": ("coldstart fleet status", "coldstart fleet status --format json"),
    "fleet scale": (
        "coldstart fleet scale llama --min 1 --max 4",
        "coldstart fleet scale llama --min 0 --max 0",
    ),
    "fleet drain": ("coldstart fleet drain node-2", "coldstart fleet drain node-2 --format json"),
    "fleet remove": ("coldstart fleet remove llama", "coldstart fleet remove llama --quiet"),
    "fleet down": ("coldstart fleet down", "coldstart fleet down --url http://127.0.0.1:8000"),
    "install": ("coldstart install cpu", "coldstart install gpu"),
    "doctor": ("coldstart doctor", "coldstart doctor --format json"),
}


def add_examples(loaded: Any, name: str) -> None:
    """Append the examples to the help of the command ``name`` and of its subcommands."""
    for subcommand, command in getattr(loaded, "commands", {}).items():
        add_examples(command, f"{name} {subcommand}")
    if examples := EXAMPLES.get(name):
        # \b prevents the formatter from wrapping the lines.
        command_epilog = "\n".join(["\b", "Examples:", *(f"  {line}" for line in examples)])
        loaded.epilog = "\n\n".join(filter(None, [loaded.epilog, command_epilog]))
