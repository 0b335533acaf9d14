"""`vllm snapshot` and `vllm preload`: our command lines and limits against the parsers and the checks of vLLM itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coldstart.artifacts import canonical

from coldstart.contract.arguments import Arguments
from coldstart.vllm import gpu_starts
from coldstart.vllm.engine import offline
from coldstart.vllm.graphs import kv_plan, plugin

REPOSITORY, COMMIT = "org/tiny", "0123456789abcdef0123456789abcdef01234567"

LIMITED = [
    "-tp 2", "--pipeline-parallel-size=2", "--data-parallel-size 2", "-pcp 2", "--api-server-count 2", "--grpc", "--headless",
    "--api-key k", "--uds /tmp/s", "--middleware a.b", "--ssl-keyfile k", "--ssl-certfile c", "--ssl-ca-certs c",
    "--enable-ssl-refresh", "--ssl-ciphers c", "--logprobs-mode raw_logits", "--logprobs-mode=processed_logits",
    '--speculative-config {"model":"m"}',
]  # fmt: skip
FREE = [
    "", "--tensor-parallel-size 1", "--api-server-count 1", "--logprobs-mode processed_logprobs", "--host 127.0.0.1 --port 9",
    "--max-model-len 1k --enable-sleep-mode --served-model-name a b",
]  # fmt: skip

# Parse each line with vLLM's own parser, and check it with vLLM's own checks.
VLLM = """
import argparse, contextlib, io, json, sys
from vllm.entrypoints.cli import preload, snapshot
from vllm.snapshot import controller
from vllm.utils.argparse_utils import FlexibleArgumentParser

def parser(command):
    made = FlexibleArgumentParser()
    command.subparser_init(made.add_subparsers(dest="subparser"))
    return made

def parse_and_check(words):
    # As vLLM's command does for `snapshot create`.
    sys.argv = ["vllm", *words]
    create = words[:2] == ["snapshot", "create"]
    made = preload.PreloadSubcommand() if words[0] == "preload" else snapshot.SnapshotSubcommand(create_requested=create)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            args = parser(made).parse_args(words)
        if create:
            snapshot.validate_create_args(args)
            return {"directory": args.snapshot_dir, "model": args.model_tag, "revision": args.revision,
                    "engine": list(controller._child_engine_argv(args, None))}
        if words[0] == "preload":
            return {"directory": args.weight_cache_socket_dir, "model": args.model}
        return {"directory": args.snapshot_dir, "host": args.host, "port": args.port}
    except ValueError as error:
        return {"error": str(error)}
    except SystemExit:
        return {"error": errors.getvalue()[-300:]}

lines = json.load(sys.stdin)
print("\\n" + json.dumps([parse_and_check(words) for words in lines]))
"""


def _engine(words: list[str]) -> list[str]:
    return gpu_starts.build_engine_arguments(REPOSITORY, COMMIT, "tiny", Arguments(words))


def _lines() -> dict[str, list[str]]:
    """Return the words of each command after the interpreter and the module, or after the program."""
    create = {
        options: gpu_starts.build_create_command(Path("/s"), _engine(options.split()))[3:]
        for options in (*LIMITED, *FREE)
    }
    return create | {
        "no commit": ["snapshot", "create", REPOSITORY, "--snapshot-dir", "/s"],
        "restore": gpu_starts.build_restore_command(Path("/s"), "127.0.0.1", 9)[3:],
        "preload": gpu_starts.build_preload_daemon_command(Path("/m"), Path("/d"), ["--max-model-len", "1k"])[
            1:
        ],
    }


@pytest.mark.vllm
def test_vllm_parses_our_command_lines_and_has_our_limits() -> None:
    lines = _lines()
    done = subprocess.run(
        [sys.executable, "-c", VLLM], input=json.dumps(list(lines.values())), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    verdicts = dict(zip(lines, json.loads(done.stdout.splitlines()[-1]), strict=True))
    for options in (*LIMITED, *FREE):
        ours = gpu_starts.find_snapshot_limit(Arguments(options.split()), REPOSITORY, COMMIT, {})
        verdict = verdicts[options]
        assert ("error" in verdict) == (ours is not None) == (options in LIMITED), (options, verdict, ours)
        assert ours is None or all(ours)
    assert "error" in verdicts["no commit"]
    for options in FREE:
        engine = _engine(options.split())
        expected = {"directory": "/s", "model": REPOSITORY, "revision": COMMIT, "engine": engine}
        assert verdicts[options] == expected
    assert verdicts["restore"] == {"directory": "/s", "host": "127.0.0.1", "port": 9}
    assert verdicts["preload"] == {"directory": "/d", "model": "/m"}


@pytest.mark.vllm
def test_vllm_reads_our_arguments_of_a_preloaded_engine() -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.weight_cache.ipc_loader import IpcModelLoader

    given = Arguments(gpu_starts.build_preload_arguments(Path("/d")))
    config = LoadConfig(
        load_format=given.get_value("load_format"),
        model_loader_extra_config=given.get_value("model_loader_extra_config"),
    )
    loader = get_model_loader(config)
    assert isinstance(loader, IpcModelLoader)
    assert (loader.socket_dir, loader.fallback) == ("/d", True)


def test_a_model_without_a_commit_has_no_snapshot() -> None:
    for repository, revision in ((None, None), (REPOSITORY, None), (REPOSITORY, "main"), (None, COMMIT)):
        found = gpu_starts.find_snapshot_limit(Arguments(), repository, revision, {})
        assert found is not None and "--revision COMMIT" in found[1]
    found = gpu_starts.find_snapshot_limit(Arguments(), REPOSITORY, COMMIT, {"VLLM_API_KEY": "k"})
    assert found is not None and found[1] == "unset VLLM_API_KEY"


def test_a_snapshot_of_another_engine_is_recognized() -> None:
    engine = _engine([])
    manifest = {"model": REPOSITORY, "model_revision": COMMIT, "engine_argv": engine, "process_tree": [7, 9]}
    assert gpu_starts.find_difference(manifest, engine, COMMIT) is None
    assert gpu_starts.read_process_ids(manifest) == [7, 9]
    others = (
        {"model": "org/other"},
        {"model_revision": "f" * 40},
        {"engine_argv": _engine(["--seed", "1"])},
        {"model": None},
    )
    for other in others:
        assert gpu_starts.find_difference(manifest | other, engine, COMMIT)
    for tree in (None, [], [1], ["7"], [True], 7):
        with pytest.raises(ValueError, match="no valid process_tree"):
            gpu_starts.read_process_ids({"process_tree": tree})


@pytest.mark.vllm
def test_a_manifest_that_vllm_writes_is_read(tmp_path: Path) -> None:
    from vllm.snapshot import manifest

    engine, texts = _engine([]), manifest.SnapshotRuntimeIdentity.model_fields.keys() - {"environment"}
    written = manifest.SnapshotManifest(
        **dict.fromkeys(texts, "x"), environment=(("a", "b"),), schema_version=1, created_at="now",
        boundary="post-engine-init-reloadable-state-released", artifact_bytes=1, model=REPOSITORY,
        served_model_name="tiny", model_revision=COMMIT, tokenizer_revision=COMMIT, engine_argv=tuple(engine),
        process_tree=(7, 9), cuda_holders=(9,), oracle_token_ids=(3,), oracle_text="a",
        oracle_sampled_token_logprob=-0.25,
    )  # fmt: skip
    tmp_path.chmod(0o700)
    manifest.write_manifest_atomic(tmp_path, written)
    read = canonical.read_json(tmp_path / "manifest.json")
    assert gpu_starts.find_difference(read, engine, COMMIT) is None
    assert gpu_starts.read_process_ids(read) == [7, 9]


@pytest.mark.parametrize(
    ("words", "on_cpu", "reason"),
    [
        ([], True, "vllm preload needs a GPU"),
        (["--load-format", "auto"], False, "sets --load-format itself"),
        (["--enable-sleep-mode"], False, "does not support --enable-sleep-mode"),
        (["--enable-eplb"], False, "enable-eplb"),
        (["--tensor-parallel-size", "4"], False, None),
    ],
)
def test_limits_of_preloaded_weights(words: list[str], on_cpu: bool, reason: str | None) -> None:
    found = gpu_starts.find_preload_limit(Arguments(words), on_cpu=on_cpu)
    assert (found is None) == (reason is None)
    assert found is None or (reason is not None and reason in found[0])


@pytest.mark.vllm
def test_missing_tool_is_named_as_vllm_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.snapshot.runtime import LocalSnapshotTools

    plugins, directory = tmp_path / "plugins", tmp_path / "snapshot"
    plugins.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(gpu_starts.PLUGINS, str(plugins))
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def require(named: str) -> None:
        found = gpu_starts.find_missing_tool(os.environ, 0)
        assert found is not None and named in found[0] and found[1]
        with pytest.raises(RuntimeError):
            LocalSnapshotTools().preflight("create", directory)

    for tool in ("criu", "cuda-checkpoint", "nvidia-smi"):
        require(f"the program {tool}")
        (tmp_path / tool).write_text("")
        (tmp_path / tool).chmod(0o755)
    require(gpu_starts.PLUGINS)
    (plugins / "cuda_plugin.so").write_text("")
    assert gpu_starts.find_missing_tool(os.environ, 0) is None
    LocalSnapshotTools().preflight("create", directory)
    found = gpu_starts.find_missing_tool(os.environ, 1000)
    assert found is not None and "needs root" in found[0]
    monkeypatch.delenv(gpu_starts.PLUGINS)
    require(gpu_starts.PLUGINS)


vllm = pytest.importorskip("vllm")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "get_device_name", classmethod(lambda *_: "H200"))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
def test_smallest_kv_cache_is_the_smallest_that_vllm_accepts(
    monkeypatch: pytest.MonkeyPatch, layout: str, window: int | None
) -> None:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:  # vLLM before 0.33
        from vllm.v1.core import kv_cache_utils as planning
    config, size = VllmConfig(), {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.half}
    config.cache_config.kv_cache_layout = layout
    model = SimpleNamespace(max_model_len=1000, original_max_model_len=1000, is_hybrid=False)
    model.supports_kv_cache_grouping = False
    monkeypatch.setattr(config, "model_config", model)
    specs: dict[str, Any] = {f"full.{layer}": FullAttentionSpec(**size) for layer in range(3)}
    if window:  # vLLM pads the smaller of two groups
        specs |= {f"slide.{layer}": SlidingWindowSpec(**size, sliding_window=window) for layer in range(2)}

    def plan(memory: int) -> Any:
        find_groups = getattr(planning, "get_global_kv_cache_groups", None)
        groups = [find_groups(config, [dict(specs)])] if find_groups else []
        return planning.get_kv_cache_configs(config, [dict(specs)], [memory], *groups)[0]

    runner = SimpleNamespace(vllm_config=config, kv_cache_config=plan(1 << 30), model_memory_usage=7)
    needs = offline.measure_rank(SimpleNamespace(model_runner=runner))
    assert needs["weights_bytes"] == 7 and plan(needs["kv_floor_bytes"]).num_blocks > 1000 / 16
    with pytest.raises(ValueError, match="To serve at least one request"):
        plan(needs["kv_floor_bytes"] - 1)


@pytest.mark.usefixtures("device")
def test_each_rank_leaves_its_own_plan_with_a_margin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's check is a strict comparison, and one failure changes the size on which graphs depend."""
    saved: list[tuple[int, int]] = []
    module = SimpleNamespace(maybe_save_startup_plan=lambda worker, size: saved.append((worker.rank, size)))
    plugin._note_kv(tmp_path, module)
    for rank in (1, 0):
        worker = SimpleNamespace(rank=rank, init_snapshot=SimpleNamespace(free_memory=80 << 30))
        worker.available_kv_cache_memory_bytes = (60 << 30) + rank  # vLLM's own plan is smaller
        module.maybe_save_startup_plan(worker, 58 << 30)
    plans, less = kv_plan.read_plans(tmp_path), 256 << 20
    assert [(p.rank, p.kv_cache_memory_bytes, p.free_memory_baseline) for p in plans] == [
        (0, (60 << 30) - less, (80 << 30) - less), (1, (60 << 30) + 1 - less, (80 << 30) - less),
    ]  # fmt: skip
    assert {(p.vllm, p.device) for p in plans} == {(vllm.__version__, "H200")}
    assert saved == [(1, 58 << 30), (0, 58 << 30)]
    # With a size that the user has set, vLLM profiles nothing and saves no plan.
    (empty := tmp_path / "empty").mkdir()
    cache = SimpleNamespace(num_gpu_blocks=1, block_size=16)
    executor = SimpleNamespace(collective_rpc=lambda _: [{"kv_floor_bytes": 3}])
    core = SimpleNamespace(available_gpu_memory_for_kv_cache=9, model_executor=executor)
    engine: Any = SimpleNamespace(config=SimpleNamespace(cache_config=cache), core=core)
    for notes, count in ((tmp_path, 2), (empty, 0)):
        task = SimpleNamespace(engine=SimpleNamespace(kv_note=notes))
        monkeypatch.setattr(offline.LaunchPlan, "current", lambda task=task: task)
        sizing = offline.describe_kv_cache(engine)
        assert len(sizing.get("plans", [])) == count and sizing["ranks"] == [{"kv_floor_bytes": 3}]


@pytest.mark.usefixtures("device")
def test_each_rank_gets_its_size_where_vllm_applies_its_own_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other processes hold is taken off the plan, unless less than a quarter of it would remain."""
    from vllm.v1.worker import gpu_worker

    original = gpu_worker.maybe_apply_startup_plan
    monkeypatch.setattr(gpu_worker, "maybe_apply_startup_plan", original)
    plan = {"rank": 0, "kv_cache_memory_bytes": 500, "free_memory_baseline": 800,
            "vllm": vllm.__version__, "device": "H200"}  # fmt: skip
    plans = [plan, plan | {"rank": 1, "kv_cache_memory_bytes": 700, "free_memory_baseline": 1000}]

    def applied(plans: Any, free: int, rank: int = 1, given: int | None = None) -> tuple[int | None, str]:
        worker = SimpleNamespace(
            vllm_config=None, rank=rank, parallel_config=SimpleNamespace(world_size=2),
            init_snapshot=SimpleNamespace(free_memory=free),
            cache_config=SimpleNamespace(kv_cache_memory_bytes=given),
        )  # fmt: skip
        gpu_worker.maybe_apply_startup_plan = original
        monkeypatch.setattr(plugin.compat, "fallbacks", [])
        plugin._apply_kv(plans, gpu_worker)
        gpu_worker.maybe_apply_startup_plan(worker)
        return worker.cache_config.kv_cache_memory_bytes, "; ".join(
            one.reason for one in plugin.compat.fallbacks
        )

    for free, rank, size in ((1000, 1, 700), (800, 0, 500), (999, 1, 699), (700, 1, 400), (475, 1, 175)):
        assert applied(plans, free, rank) == (size, "")
    assert applied(plans, 1, given=9) == (9, "")
    for wrong, free, rank, said in (
        (plans, 474, 1, "on rank 1: 474 bytes are free"),
        ([plan], 1 << 40, 0, "for 1 ranks, but this engine has 2"),
        ([plan | {"device": "A"}, plans[1]], 1 << 40, 0, "on A, but this engine runs"),
    ):
        size, reason = applied(wrong, free, rank)
        assert size is None and said in reason
