"""A template process holds no secret of the process that started it: not in memory, environment, arguments or files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import process_memory

from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import WeightsRequest
from coldstart.launch import server_process, template_environment, template_pool

NAMES = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "VLLM_API_KEY",
    "OPENAI_API_KEY", "WANDB_API_KEY", "GITHUB_TOKEN", "DB_PASSWORD", "PGPASSWORD", "AZURE_CLIENT_SECRET", "SLACK_WEBHOOK_URL",
    "JWT_SECRET", "S3_SECRET_ACCESS_KEY", "COLDSTART_PREFETCH_TOKEN", "NO_NAME_THAT_TELLS", "VLLM_OF_A_URL",
)  # fmt: skip
PLANTED = {name: f"PLANTED-{number:02}" for number, name in enumerate(NAMES)}
PLANTED["VLLM_OF_A_URL"] = "https://user:PLANTED-17@host/"
ARGUMENTS = ["serves", "--api-key", "PLANTED-18", "--hf-token=PLANTED-19"]
ARGUMENTS += [
    "--allowed-origins",
    "https://user:PLANTED-22@host",
    "--hf-overrides",
    '{"s3_secret": "PLANTED-23"}',
]


def plan(*arguments: str) -> LaunchPlan:
    return LaunchPlan(
        list(arguments),
        key="sha256:" + "a" * 64,
        env={"MY_TOKEN": "PLANTED-20", "OMP_NUM_THREADS": "1"},
        weights_from=WeightsRequest("https://user:PLANTED-21@host/weights", Path("/plan.json")),
    )


@pytest.fixture
def warm(
    home: Path, fake_engine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> template_pool.RunningTemplate:
    fake_engine("serves")
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    return template_pool.start("engine", plan(*ARGUMENTS), "tiny", 20)


def test_template_holds_no_secret_of_its_starter(warm: template_pool.RunningTemplate) -> None:
    try:
        for name in ("environ", "cmdline"):
            assert b"PLANTED" not in Path(f"/proc/{warm.pid}/{name}").read_bytes()
        assert process_memory.find(warm.pid or 0, b"PLANTED-") == []
        kept = [
            path for path in warm.directory.rglob("*") if path.is_file() and b"PLANTED-" in path.read_bytes()
        ]
        assert kept == []
    finally:
        template_pool.stop(warm, force=True)


def test_template_holds_no_secret_of_a_server_that_it_forks(warm: template_pool.RunningTemplate) -> None:
    try:
        process, reader = server_process.fork_server(plan(*ARGUMENTS), warm.socket)
        report = server_process.await_readiness(process, reader, time.monotonic(), 20).report
        assert report["args"] == ARGUMENTS[1:]
        assert process_memory.find(warm.pid or 0, b"PLANTED-") == []
    finally:
        template_pool.stop(warm, force=True)


def test_forked_server_has_the_environment_of_its_caller(
    warm: template_pool.RunningTemplate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SAID", "by the caller")
    read = tmp_path / "said"
    try:
        with read.open("w") as out:
            import os

            saved = os.dup(2)
            os.dup2(out.fileno(), 2)
            try:
                process, reader = server_process.fork_server(plan("says"), warm.socket)
                server_process.await_readiness(process, reader, time.monotonic(), 20)
            finally:
                os.dup2(saved, 2)
                os.close(saved)
        assert "by the caller" in read.read_text()
    finally:
        template_pool.stop(warm, force=True)


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("s3://bucket/w", True),
        ("https://me:word@host/w", False),
        ("https://host/w?X-Amz-Signature=ab", False),
    ],
)
def test_plan_names_the_source_when_it_holds_no_credential(source: str, kept: bool) -> None:
    request = WeightsRequest(source, Path("/plan.json"))
    redacted = template_environment.redact_plan(LaunchPlan([], weights_from=request))
    assert redacted.weights_from == (request if kept else None)


def test_template_record_holds_no_secret(warm: template_pool.RunningTemplate) -> None:
    try:
        about = json.loads((warm.directory / "about.json").read_text())
        assert about["environment"]["OMP_NUM_THREADS"] == "1" and "PLANTED" not in json.dumps(about)
    finally:
        template_pool.stop(warm, force=True)
