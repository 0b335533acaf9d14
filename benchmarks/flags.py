"""Every flag of vLLM's parser, and every variable that the installed sources read: who may have read it, and what a mode does.

    python benchmarks/flags.py MODEL_DIRECTORY [--json FILE]

Static part, over all flags. `the server's own`: vLLM's engine arguments have no field for it, and what our server runs of
vLLM's reads it again in every server, however that began. `named`: only what we do not run reads it, and a start says so in
its fallbacks. `nobody reads it`: no source of vLLM's does. Any other flag is tried with other values than its default, and the
configurations are compared as a worker's adoption compares them: `steps down` where the worker would be told something else,
`honoured` where all that differs are leaves that are set apart, each with its reason, `no effect` where no leaf differs
whatever was tried, `refused` where vLLM takes none of the values tried here.

Dynamic part, on what a worker reads: one real worker is built with every configuration's reads recorded. A leaf that is set
apart and was read by it, after the configuration was made, is listed under `apart but read`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import importlib.util
import itertools
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import environment_reads

from coldstart.machine import secrets
from coldstart.serve import template_environment, unserved

PACKAGES = (
    "vllm",
    "torch",
    "transformers",
    "huggingface_hub",
    "tokenizers",
    "safetensors",
    "numpy",
    "xgrammar",
    "compressed_tensors",
)
# Of vLLM's sources, those that no server of ours runs: its command line's subcommands and other launchers.
_NOT_RUN = re.compile(
    r"benchmarks/|snapshot/|entrypoints/cli/|entrypoints/(launchers/)?(run_batch|dp_supervisor|grpc_server)"
    r"|entrypoints/launchers/render|entrypoints/launchers/cli_args"
)
_READS = re.compile(r"\bargs\.(\w+)|getattr\(\s*args,\s*['\"](\w+)['\"]")
_TEXTS = ("2", "0.5", "auto", "true", "cpu", "/tmp", "spawn", "[1]", '{"a": 1}', "{}", "1,2", "DEBUG")
# Values that only who has read vLLM's sources can know.
_KNOWN: dict[str, list[list[str]]] = {
    "speculative_config": [['{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}']],
    "kv_transfer_config": [['{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}']],
    "kv_events_config": [['{"enable_kv_cache_events": true, "publisher": "null"}']],
    "ec_transfer_config": [['{"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}']],
    "compilation_config": [['{"mode": 0}']],
    "pooler_config": [['{"use_activation": false}']],
    "attention_config": [['{"use_prefill_decode_attention": true}']],
    "limit_mm_per_prompt": [['{"image": 2}']],
    "hf_overrides": [['{"rope_theta": 5000.0}']],
    "structured_outputs_config": [['{"backend": "guidance"}']],
    "observability_config": [['{"show_hidden_metrics_for_version": "0.1"}']],
    "profiler_config": [['{"profiler": "torch", "torch_profiler_dir": "/tmp"}']],
    "override_generation_config": [['{"temperature": 0.1}']],
    "generation_config": [["vllm"]],
    "data_parallel_size": [["2"]],
    "tensor_parallel_size": [["2"]],
    "pipeline_parallel_size": [["2"]],
    "otlp_traces_endpoint": [["http://127.0.0.1:4317"]],
    "max_num_batched_tokens": [["1024"]],
    "block_size": [["32"], ["64"]],
    "max_num_seqs": [["300"]],
    "tokenizer": [[".again"]],
    "hf_config_path": [[".again"]],
    "lora_modules": [["a=/tmp"]],
    "worker_cls": [["vllm.v1.worker.cpu_worker.CPUWorker"]],
    "reasoning_parser": [["qwen3"]],
    "scheduler_cls": [["vllm.v1.core.sched.scheduler.Scheduler"]],
    "quantization": [["fp8"]],
    "attention_backend": [["CPU_ATTN"]],
    "config_format": [["hf"]],
    "cudagraph_capture_sizes": [["1", "2", "4"]],
    "ir_op_priority": [['{"rms_norm": ["vllm_c", "native"]}']],
    "distributed_executor_backend": [["mp"]],
    "data_parallel_size_local": [["1"]],
    "data_parallel_rank": [["1"]],
    "data_parallel_backend": [["ray"]],
    "collect_detailed_traces": [["worker"]],
    "spec_method": [["suffix"], ["ngram_gpu"]],
    "spec_tokens": [["3"]],
    "log_config_file": [[".log"]],
    "lora_dtype": [["float16"]],
    "lora_target_modules": [["q_proj"]],
    "reasoning_config": [['{"reasoning_parser": "qwen3"}']],
}
# What has to be said as well for the flag to be taken, or to matter; by the beginnings of the flags' names.
_WITH: dict[str, list[str]] = {
    "max_lora": ["--enable-lora"],
    "lora_": ["--enable-lora"],
    "max_loras": ["--enable-lora"],
    "max_cpu_loras": ["--enable-lora"],
    "fully_sharded_loras": ["--enable-lora"],
    "specialize_active_lora": ["--enable-lora"],
    "enable_tower_connector_lora": ["--enable-lora"],
    "enable_mixed_moe_lora_format": ["--enable-lora"],
    "enable_moe_shared_loras": ["--enable-lora"],
    "spec_": ["--spec-method", "ngram", "--spec-tokens", "2"],
    "per_request_spec": ["--spec-method", "ngram", "--spec-tokens", "2"],
    "data_parallel_": ["--data-parallel-size", "2"],
    "numa_bind_": ["--numa-bind"],
    "collect_detailed": ["--otlp-traces-endpoint", "http://127.0.0.1:4317"],
}


def flags(model: str) -> list[dict[str, Any]]:
    """One row for each flag: its name, the verdict, the leaves and the reason, the seconds that the decision took."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _quicken()
    plain = ["--model", model, "--max-model-len", "512", "--kv-cache-memory-bytes", "134217728"]
    engine = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    rows = []
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        if not action.option_strings or action.dest in ("help", "model"):
            continue
        began = time.monotonic()
        if action.dest in engine or action.dest == "config":
            more = next((words for start, words in _WITH.items() if action.dest.startswith(start)), [])
            found = _tried([*plain, *more], action, model)
        else:
            found = _front(action.dest)
        rows.append(
            {"flag": action.option_strings[0], **found, "seconds": round(time.monotonic() - began, 4)}
        )
    return rows


def _quicken() -> None:
    """One parser for all of the tries, silent where it refuses one: making it and its usage take most of the time."""
    from vllm.entrypoints.launchers import cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    made = cli_args.make_arg_parser(FlexibleArgumentParser())
    made.print_usage = made.print_help = lambda file=None: None
    parse = made.parse_args
    # Its defaults are objects that vLLM's checks write to.
    made.parse_args = lambda words: copy.deepcopy(parse(words))
    cli_args.make_arg_parser = lambda parser: made
    logging.disable(logging.WARNING)


def _front(dest: str) -> dict[str, Any]:
    readers = sorted(_readers().get(dest, ()))
    run = [file for file in readers if not _NOT_RUN.match(file)]
    if dest in unserved.FLAGS:
        return {"verdict": "named", "reason": unserved.FLAGS[dest], "read_by": readers}
    if run or any(file.endswith("cli_args.py") for file in readers):
        return {"verdict": "the server's own", "read_by": run or readers}
    return {"verdict": "only others read it" if readers else "nobody reads it", "read_by": readers}


@cache
def _readers() -> dict[str, set[str]]:
    """{flag's name in the parsed arguments: files of vLLM's that read it}."""
    root, found = Path(_origin("vllm")), dict[str, set[str]]()
    for path in root.rglob("*.py"):
        for match in _READS.finditer(path.read_text(encoding="utf-8")):
            found.setdefault(match[1] or match[2], set()).add(str(path.relative_to(root)))
    return found


def _leaves(*words: str) -> dict[str, object]:
    """Every leaf of the configuration, those that are set apart too; what making it does to the environment is undone."""
    from coldstart.vllm.engine import adoption, server

    before = dict(os.environ)
    try:
        args, _ = server.parse_args(words)
        config = server.configure(args)
    finally:
        os.environ.clear()
        os.environ.update(before)
    place = config.model_config.model
    return {name: adoption.MODEL if leaf == place else leaf for name, leaf in adoption._leaves(config, "", 0)}


_plain = cache(_leaves)
_TRIED = 6


def _tried(base: list[str], action: argparse.Action, model: str) -> dict[str, Any]:
    """The first value that makes a difference to a worker decides; else one that makes any; else none did."""
    from coldstart.vllm.engine import adoption

    best: dict[str, Any] | None = None
    errors: list[str] = []
    try:
        built = _plain(*base)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - what it needs beside it is not to be had here
        return {"verdict": "refused", "reason": [f"{' '.join(base[6:])}: {_said(error)}"]}
    for words in itertools.islice(_others(action, model), _TRIED):
        try:
            asked = _leaves(*base, *words)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever vLLM says of a value that it does not take
            errors.append(f"{' '.join(words)}: {_said(error)}")
            continue
        differing = sorted(
            name
            for name in {*built, *asked}
            if built.get(name) != asked.get(name) and not _is_drawn_anew(name)
        )
        counting = [name for name in differing if adoption.apart(name) is None]
        wanted = {name: leaf for name, leaf in asked.items() if adoption.apart(name) is None}
        had = {name: leaf for name, leaf in built.items() if adoption.apart(name) is None}
        if counting and adoption.difference(had, wanted):
            return {"verdict": "steps down", "value": words[1:], "leaves": counting[:8]}
        if counting:
            best = {
                "verdict": "honoured",
                "value": words[1:],
                "leaves": counting,
                "reason": "a roomier worker",
            }
        elif differing:
            reasons = sorted({str(adoption.apart(name)) for name in differing})
            best = best or {
                "verdict": "honoured",
                "value": words[1:],
                "leaves": differing,
                "reason": "; ".join(reasons),
            }
        else:
            best = best or {"verdict": "no effect", "words": words}
    if best is not None and best["verdict"] == "no effect" and errors:
        best["refused"] = errors[:3]
    return best or {"verdict": "refused", "reason": errors[:3]}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _is_drawn_anew(name: str) -> bool:
    """Leaves that differ between two configurations of the very same words."""
    from coldstart.vllm.engine import adoption

    return name == "instance_id" or (adoption.apart(name) == adoption._NAMED and "port" in name)


def _others(action: argparse.Action, model: str) -> Iterator[list[str]]:
    name, default = action.option_strings[0], action.default
    for words in _KNOWN.get(action.dest, ()):
        yield [name, *(_place(word, model) for word in words)]
    if action.dest == "config":
        yield [name, str(_written("yaml", "seed: 7\n"))]
    elif isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        negative = next((option for option in action.option_strings if option.startswith("--no-")), name)
        yield from ([word] for word in dict.fromkeys((negative if default else name, name, negative)))
    elif action.choices:
        yield from ([name, str(choice)] for choice in action.choices if choice != default)
    elif isinstance(default, int | float) and not isinstance(default, bool):
        yield from ([name, str(value)] for value in (default + 1, default * 2, default / 2, 2, 1, 0))
    else:
        yield from ([name, value] for value in _TEXTS)


@cache
def _place(word: str, model: str) -> str:
    """ ".again" is the same model at another place, ".log" a logging configuration."""
    if word == ".log":
        return str(_written("json", '{"version": 1, "disable_existing_loggers": false}'))
    if word != ".again":
        return word
    place = Path(tempfile.mkdtemp()) / "again"
    place.symlink_to(model)
    return str(place)


def _written(suffix: str, text: str) -> Path:
    with tempfile.NamedTemporaryFile("w", suffix=f".{suffix}", delete=False) as file:
        file.write(text)
    return Path(file.name)


def worker_reads(model: str) -> dict[str, Any]:
    """Which leaves of the configuration a worker reads while it is built and warmed up, and which of them are set apart."""
    from coldstart.vllm.engine import adoption, executor, server

    words = ["--model", model, "--max-model-len", "512", "--kv-cache-memory-bytes", "134217728"]
    words += ["--enforce-eager"]
    args, _ = server.parse_args(words)
    config = server.configure(args)
    places = {id(config): ""}
    for field in dataclasses.fields(config):
        places[id(getattr(config, field.name))] = f"{field.name}."
    read: set[str] = set()
    kinds = [type(config), *{type(getattr(config, field.name)) for field in dataclasses.fields(config)}]
    kinds = [kind for kind in kinds if dataclasses.is_dataclass(kind)]

    def recording(self: Any, name: str) -> Any:
        if not name.startswith("__") and (place := places.get(id(self))) is not None:
            read.add(f"{place}{name}")
        return object.__getattribute__(self, name)

    with contextlib.ExitStack() as stack:
        for kind in kinds:
            kind.__getattribute__ = recording
            stack.callback(lambda kind=kind: delattr(kind, "__getattribute__"))
        built = executor._Prebuilder(config)
        built.collective_rpc("warm_up")
    known = {name for name, _ in adoption._leaves(config, "", 0)}
    leaves = sorted(
        name for name in read if any(leaf == name or leaf.startswith(f"{name}.") for leaf in known)
    )
    # Those whose own fields are recorded; an absent one, or one that is no such, counts as read by itself.
    whole = {f.name for f in dataclasses.fields(config) if type(getattr(config, f.name)) in kinds}
    apart = {name: str(adoption.apart(name)) for name in leaves if adoption.apart(name) and name not in whole}
    return {"leaves read": len(set(leaves) - whole), "apart but read": apart}


def variables() -> dict[str, Any]:
    """How many variables the installed sources read, and how each is judged."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        if (place := _origin(package)) is not None:
            found |= environment_reads.names(Path(place))
    unjudged = {name: file for name, file in found.items() if _judged(name) == _ELSE}
    return {"read": len(found), **Counter(map(_judged, found)), "unjudged": unjudged}


def _origin(package: str) -> Any:
    spec = importlib.util.find_spec(package)
    return str(Path(spec.origin).parent) if spec is not None and spec.origin is not None else None


_ELSE = "of no family: given to no kept process"


def _judged(name: str) -> str:
    if secrets.named(name):
        return "secret: given to no kept process"
    if template_environment.counts(name):
        return "counts: steps down where it differs"
    if name in template_environment.IRRELEVANT:
        return "irrelevant, with a reason"
    return "passed on, enters nothing computed" if template_environment._may_pass(name) else _ELSE


def main() -> None:
    """Print the table's summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = flags(asked.model)
    judged = variables()
    summary = {
        "flags": len(rows),
        **Counter(row["verdict"] for row in rows),
        "slowest": sorted(rows, key=lambda row: -row["seconds"])[:3],
        "variables": {name: value for name, value in judged.items() if name != "unjudged"},
        "worker": worker_reads(asked.model),
    }
    if asked.json:
        document = {"summary": summary, "rows": rows, "unjudged variables": judged["unjudged"]}
        text = json.dumps(document, indent=1).replace(asked.model, "MODEL")
        asked.json.write_text(text + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
