"""A snapshot, a template or a worker is used only if files, flags and variables are those of the start."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from coldstart.contract.plan import LaunchPlan
from coldstart.launch import server_process, template_environment, template_pool
from coldstart.system import fingerprint

PLAN = LaunchPlan(["serves"], key="sha256:" + "a" * 64)


@pytest.fixture
def parts(home: Path, tmp_path: Path) -> list[Path]:
    """Copy 50 files that this process has mapped or imported."""
    files = {*fingerprint.list_imported_files(), *fingerprint.list_mapped_files(os.getpid())}
    chosen = random.Random(7).sample(sorted(files), 200)
    small = [Path(file) for file in chosen if 0 < Path(file).stat().st_size < 5_000_000][:50]
    made = [tmp_path / f"{number:02}-{file.name}" for number, file in enumerate(small)]
    for file, copy in zip(small, made, strict=True):
        shutil.copyfile(file, copy)
    assert len(made) == 50
    return made


def record(parts: list[Path], directory: Path) -> None:
    states = fingerprint.read_states(map(str, parts))
    recorded = fingerprint.Fingerprint(fingerprint.read_machine_properties(), states)
    (directory / fingerprint.ABOUT).write_bytes(msgspec.json.encode(recorded))


def test_one_changed_byte_in_each_of_fifty_files_is_found(parts: list[Path], tmp_path: Path) -> None:
    for file in parts:
        record(parts, tmp_path)
        assert fingerprint.find_mismatch(tmp_path, "template") is None
        changed, before = bytearray(file.read_bytes()), file.stat()
        changed[len(changed) // 2] ^= 1
        while file.stat().st_ctime_ns == before.st_ctime_ns:  # within the tick of the file system's clock
            file.write_bytes(changed)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # size and mtime say nothing
        expected = f"{file} has changed since the template was created"
        assert fingerprint.find_mismatch(tmp_path, "template") == expected
    parts[0].unlink()
    expected = f"{parts[0]} was removed since the template was created"
    assert fingerprint.find_mismatch(tmp_path, "template") == expected


def test_template_stays_usable_when_others_link_to_its_files(parts: list[Path], tmp_path: Path) -> None:
    record(parts, tmp_path)
    before = [file.stat().st_ctime_ns for file in parts]
    for number, file in enumerate(parts):
        os.link(file, tmp_path / f"link-{number}")
    assert all(file.stat().st_ctime_ns != ctime for file, ctime in zip(parts, before, strict=True))
    assert fingerprint.find_mismatch(tmp_path, "template") is None


def test_large_library_with_another_mtime_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(bytes(fingerprint.LARGE_BYTES + 1))
    record([library], tmp_path)
    os.link(library, tmp_path / "link")
    assert fingerprint.find_mismatch(tmp_path, "template") is None
    os.utime(library, ns=(0, 0))
    found = fingerprint.find_mismatch(tmp_path, "template")
    assert found == f"{library} has changed since the template was created"


@pytest.fixture
def warm(home: Path, fake_engine: Callable[[str], None]) -> Iterator[template_pool.RunningTemplate]:
    fake_engine("serves")
    started = template_pool.start_template("engine", PLAN, "tiny", 20)
    yield started
    template_pool.stop_template(started)


def test_a_template_of_an_older_commit_is_refused(warm: template_pool.RunningTemplate) -> None:
    """Our code has changed since the template recorded it: its memory differs from the files."""
    assert template_pool.find_incompatibility(warm, PLAN) is None
    record = warm.directory / fingerprint.ABOUT
    about = json.loads(record.read_text())
    ours = next(path for path in about["files"] if path.endswith("coldstart/launch/template_pool.py"))
    size, modified_ns, changed_ns, digest = about["files"][ours]
    about["files"][ours] = [size, modified_ns, changed_ns - 1, digest[::-1]]
    record.write_text(json.dumps(about))
    assert f"{ours} has changed since the template was created" == template_pool.find_incompatibility(
        warm, PLAN
    )


def test_template_without_record_is_refused(warm: template_pool.RunningTemplate) -> None:
    (warm.directory / fingerprint.ABOUT).unlink()
    assert "no valid fingerprint" in str(template_pool.find_incompatibility(warm, PLAN))
    (warm.directory / fingerprint.ABOUT).write_text(json.dumps({"format": 1}))
    assert "no valid fingerprint" in str(template_pool.find_incompatibility(warm, PLAN))


def test_a_template_of_another_environment_is_refused(
    warm: template_pool.RunningTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    found = str(template_pool.find_incompatibility(warm, PLAN))
    assert found.startswith("TORCHINDUCTOR_MAX_AUTOTUNE: the template was created with none")


def test_template_of_another_machine_is_refused(warm: template_pool.RunningTemplate) -> None:
    record = warm.directory / fingerprint.ABOUT
    about = json.loads(record.read_text())
    assert all(about["machine"].values())
    for name in about["machine"]:
        other = about | {"machine": about["machine"] | {name: "another"}}
        record.write_text(json.dumps(other))
        found = template_pool.find_incompatibility(warm, PLAN)
        assert f"was created on {name} another, but this machine has" in str(found)


VARIABLES = (
    "VLLM_USE_AOT_COMPILE", "TORCHINDUCTOR_MAX_AUTOTUNE", "OMP_NUM_THREADS", "GLIBC_TUNABLES", "KMP_AFFINITY",
    "LD_PRELOAD", "MKL_NUM_THREADS", "TORCHDYNAMO_DISABLE", "PYTORCH_ENABLE_MPS_FALLBACK", "PYTHONHASHSEED",
    "CXX",
    "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_SIM_MULTI_NUMA", "TORCH_A_VARIABLE_OF_NEXT_YEAR",
)  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES)
def test_difference_names_variable_that_a_worker_could_read(name: str) -> None:
    reason = template_environment.find_difference({}, {name: "1"}, "template")
    assert reason == f"{name}: the template was created with none, but this start has '1'"
    assert template_environment.find_difference({name: "1"}, {name: "2"}, "template") is not None
    assert (
        template_environment.find_difference(
            {name: "1"}, {name: "1", "HOME": "/x", "HF_TOKEN": "abcdefghi"}, "template"
        )
        is None
    )


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--logprobs-mode", "raw_logits"], "logprobs_mode"),
        (["--gdn-prefill-backend", "triton"], "gdn_prefill_backend"),
        (["--additional-config", '{"of": "a plug-in"}'], "additional_config"),
        (["--jit-monitor-mode", "error"], "jit_monitor_mode"),
        (["--num-gpu-blocks-override", "9"], "num_gpu_blocks_override"),
        (["-cc.mode=0"], "compilation_config"),
        (["--max-num-seqs", "9"], "max_num_seqs: the prebuilt worker has 8, but this start needs 9"),
        # The scheduler enforces a smaller limit.
        (["--max-num-seqs", "7"], None),
        # Flags that a worker does not receive or does not use.
        (["--additional-config", '{"coldstart_scheduler": {}}'], None),
        (["--scheduling-policy", "priority", "--served-model-name", "x", "--api-key", "k"], None),
    ],
)
def test_difference_names_flag_that_worker_may_read(words: list[str], named: str | None, home: Path) -> None:
    """Over vLLM's own parser."""
    from coldstart.vllm.engine import adoption, server

    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    config |= {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 64}
    place = home / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    given = ["--model", str(place), "--skip-tokenizer-init", "--max-num-seqs", "8"]

    def described(*more: str, key: str = "k") -> dict[str, str]:
        return adoption.describe_worker(server.parse_args([*given, *more])[0], LaunchPlan([], key=key))

    reason = adoption.find_difference(described(), described(*words))
    assert (reason or "None").startswith(str(named))
    assert "the bundle's key" in str(adoption.find_difference(described(), described(key="other")))


def test_forked_server_reports_reason_when_the_worker_does_not_fit(
    warm: template_pool.RunningTemplate,
) -> None:
    process, reader = server_process.fork_server(LaunchPlan(["unfit"]), warm.socket)
    with pytest.raises(server_process.ServerExitedError, match="this start: a leaf differs"):
        server_process.await_readiness(process, reader, time.monotonic(), 20)
