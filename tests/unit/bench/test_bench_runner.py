"""The complete bench with fake servers: its report, and the causes of a failure."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.fake_launcher import FakeLauncher as Fake

from benchmarks.gpu import plan
from coldstart.bench import benchmark, measure, result, run_order
from coldstart.bench.measure import RunSettings
from coldstart.bench.runner import Bench
from coldstart.errors import CommandFailedError, NoBundleError
from coldstart.launch.completions import CompletionFailedError
from coldstart.system.devices import nvml
from coldstart.validate import launchers
from coldstart.validate.launch import Launcher, ModeUnavailableError, RunFiles
from coldstart.validate.launchers import ModelUnderTest


@pytest.mark.parametrize("end", ["sleep 60", "exit 3"])
def test_step_of_the_device_plan_keeps_the_ends_of_both_streams(end: str, tmp_path: Path) -> None:
    part = plan.Part("probe", "7b", tmp_path, tmp_path, seconds=0.0)
    with pytest.raises(RuntimeError, match=r"(?s)printed.*logged"):
        part.run("step", "sh", "-c", f"echo printed; echo logged >&2; {end}")


def test_part_of_the_device_plan_keeps_its_answers_when_it_is_cut_off(tmp_path: Path) -> None:
    part = plan.Part("probe", "7b", tmp_path, tmp_path, seconds=plan.LEAST_S + 5.0)
    part.answer("first", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        part.answer("second", Mock(side_effect=KeyboardInterrupt))
    assert json.loads(part.place.read_text())["answers"] == {"first": {"found": 1, "seconds": 0.0}}
    part.end = 0.0
    part.answer("third", lambda: 3)
    assert json.loads(part.place.read_text())["answers"]["third"]["error"] == "no time was left"


def bench(
    launchers: list[Launcher], settings: RunSettings, tmp_path: Path, runs: int = 2
) -> tuple[dict[str, Any], list[str]]:
    messages: list[str] = []
    one = Bench(launchers, settings, tmp_path, messages.append)
    measured = one.measure(runs, warmup=0)
    document = result.build_document(
        measured, model="/models/tiny", vllm_args=["--x"], command_line=["bench", "--cache-dir=/home/me/c"]
    )
    return json.loads(json.dumps(document)), messages


@pytest.mark.slow
def test_bench_reports_all_modes(settings: RunSettings, tmp_path: Path) -> None:
    settings = RunSettings(settings.prompts, 4, 20.0, measure_steady_state=True)
    launchers = [Fake("vllm-cold"), Fake("vllm-warm"), Fake("fresh"), Fake("template-engine", "daemon")]
    document, messages = bench(launchers, settings, tmp_path)
    assert document["failures"] == []
    assert document["tokens_identical"] is True
    # The first cold start leaves vllm-warm its caches: nothing has to be warmed.
    assert sum("first token after" in line for line in messages) == 4 * 2
    for mode in ("vllm-cold", "vllm-warm", "fresh", "template-engine"):
        found = document["modes"][mode]
        assert set(found["first_token_s"]) == set(found["cpu_s"]) == {"median", "min", "max", "n"}
        assert found["first_token_s"]["n"] == 2
        assert found["phases"]["until listening"]["n"] == 2
    for mode in ("vllm-warm", "fresh", "template-engine"):
        past = document["modes"][mode]["steady"]
        assert past["latency_s"]["n"] == 2 and past["throughput_ratio"]["ratio"] > 0
    assert document["modes"]["vllm-cold"]["steady"] is None
    assert document["modes"]["vllm-warm"]["ratio"] == 1
    assert document["modes"]["vllm-warm"]["steady"]["latency_ratio"]["ratio"] == 1
    assert document["modes"]["fresh"]["fast_path"] == {"compile": True}
    assert document["model"] == "tiny"
    assert document["command_line"] == ["bench", "--cache-dir=c"]
    assert [launcher.closed for launcher in launchers] == [1] * 4


def test_server_that_dies_after_its_start_fails_alone(
    settings: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = Mock(side_effect=CompletionFailedError("broken off"))
    monkeypatch.setattr(measure, "measure_steady_state", fail)
    settings = RunSettings(settings.prompts, 4, 20.0, measure_steady_state=True)
    document, _ = bench([Fake("vllm-warm"), Fake("fresh")], settings, tmp_path, runs=1)
    assert [reason.split(" server")[0] for reason in document["failures"]] == [
        "vllm-warm: the vllm-warm",
        "fresh: the fresh",
    ]


@pytest.mark.parametrize(
    ("behaviour", "failure", "fallbacks"),
    [
        ("other-tokens", "tokens differ from those of vllm-warm", []),
        ("fell-back", "the fast path was not used: compile: another ISA", ["compile: another ISA"]),
    ],
)
def test_a_start_that_is_not_the_requested_one_fails_with_its_reason(
    settings: RunSettings, tmp_path: Path, behaviour: str, failure: str, fallbacks: list[str]
) -> None:
    launchers = [Fake("vllm-warm"), Fake("fresh", behaviour)]
    document, _ = bench(launchers, settings, tmp_path, runs=1)
    assert document["failures"] == [f"fresh: {failure}"]
    assert document["tokens_identical"] is (behaviour != "other-tokens")
    assert document["modes"]["fresh"]["fallbacks"] == fallbacks


def test_other_tokens_of_eager_mode_are_no_failure(settings: RunSettings, tmp_path: Path) -> None:
    launchers = [Fake("vllm-warm"), Fake("vllm-free"), Fake("vllm-eager", "other-tokens")]
    document, _ = bench(launchers, settings, tmp_path, runs=1)
    assert document["failures"] == [] and document["tokens_identical"] is True
    assert document["modes"]["vllm-eager"]["tokens_identical"] is False
    assert all(document["modes"][mode]["ratio"] > 0 for mode in ("vllm-free", "vllm-eager"))


def test_bench_fails_when_no_mode_could_run(settings: RunSettings, tmp_path: Path) -> None:
    document, _ = bench([Fake("snapshot", "unavailable")], settings, tmp_path)
    assert document["failures"] == ["no mode could run"]


def test_no_bundle_ends_the_bench(settings: RunSettings, tmp_path: Path) -> None:
    launcher = Fake("fresh", "no-bundle")
    with pytest.raises(NoBundleError) as caught:
        bench([launcher], settings, tmp_path)
    assert caught.value.exit_code == 3
    assert launcher.closed == 1


def test_benchmark_that_is_cut_off_keeps_its_runs(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[dict[str, Any]] = []

    def keep(document: result.Document) -> None:
        kept.append(json.loads(json.dumps(document)))
        if len(kept) == 3:
            raise KeyboardInterrupt

    launchers = [Fake("vllm-warm"), Fake("fresh")]
    monkeypatch.setattr(benchmark, "prepare_subject", lambda _: None)
    monkeypatch.setattr(benchmark, "create_launchers", lambda *_: launchers)
    monkeypatch.setattr(benchmark, "RunSettings", lambda *_, **__: settings)
    request = benchmark.BenchOptions(
        "tiny", modes="vllm-warm,fresh", runs=2, warmup=0, measure_steady_state=False, revision="r1"
    )
    with pytest.raises(KeyboardInterrupt):
        benchmark.run(request, lambda _: None, keep)
    assert benchmark.INCOMPLETE_FAILURE in kept[-1]["failures"]
    assert kept[-1]["command_line"][-3:] == ["--revision", "r1", "--no-steady"]
    assert sum(len(found["samples"]) for found in kept[-1]["modes"].values() if "samples" in found) == 2
    assert [launcher.closed for launcher in launchers] == [1, 1]


CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR")
SUBJECT = ModelUnderTest("tiny-llama", "/models/tiny", ("--max-model-len", "256"))


@pytest.mark.parametrize("mode", [mode for mode in run_order.MODES if mode not in run_order.BASELINES])
def test_every_mode_of_coldstart_serves_the_same_arguments(tmp_path: Path, mode: str) -> None:
    (launcher,) = launchers.create_launchers(SUBJECT, [mode], tmp_path)
    run = RunFiles.create(tmp_path / "run-files")
    argv, variables = launcher.build_command(run)
    assert launcher.mode == argv[argv.index("--mode") + 1] == mode
    assert argv[argv.index("--ready-file") + 1] == str(run.ready_file)
    assert argv[-3:] == ["--", "--max-model-len", "256"]
    assert variables["XDG_RUNTIME_DIR"] == str(tmp_path / "run")
    assert launcher.writes_ready_file


def test_warm_starts_and_the_first_cold_one_share_their_caches(tmp_path: Path) -> None:
    cold, warm = launchers.create_launchers(SUBJECT, [run_order.VLLM_COLD, run_order.VLLM_WARM], tmp_path)
    first, second, shared = (
        one.build_command(RunFiles.create(tmp_path / str(number)))[1]
        for number, one in enumerate((cold, cold, warm))
    )
    for name in CACHES:
        assert shared[name] == first[name] != second[name]
        assert all(not list(Path(one[name]).iterdir()) for one in (first, second))


@pytest.mark.parametrize("on_cpu", [True, False])
def test_plain_vllm_has_free_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    """The options of a GPU's build are not given to the CPU's, and never replace the user's own."""
    monkeypatch.setattr(launchers.runtime, "targets_cpu", lambda: on_cpu)
    monkeypatch.setattr(launchers, "find_spec", lambda name: name)
    names = ["vllm-warm", "vllm-free", "vllm-eager"]
    (warm, warm_set), (free, free_set), (eager, _) = (
        one.build_command(RunFiles.create(tmp_path / one.mode))
        for one in launchers.create_launchers(SUBJECT, names, tmp_path)
    )
    plain = [word for word in warm[5:] if not word.isdigit()]
    assert [word for word in eager[5:] if not word.isdigit()] == [*plain, "--enforce-eager"]
    more = [] if on_cpu else ["-cc", launchers.FULL_DECODE_ONLY, "--load-format", "instanttensor"]
    assert [word for word in free[5:] if not word.isdigit()] == [*plain, *more]
    assert launchers.FREE_VARIABLES.items() <= free_set.items()
    assert not launchers.FREE_VARIABLES.items() <= warm_set.items()
    own = ModelUnderTest("m", "/m", ("--load-format", "auto", "-cc", "{}"))
    (free_,) = launchers.create_launchers(own, ["vllm-free"], tmp_path)
    assert list(free_.build_command(RunFiles.create(tmp_path / "own"))[0]).count("-cc") == 1


def test_a_mode_that_this_machine_lacks_gives_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Callable[[], list[list[str]]]
) -> None:
    """On a GPU `snapshot` is that of vLLM."""
    monkeypatch.setattr(launchers.runtime, "targets_cpu", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nvml, "read_driver_version", lambda: None)
    reasons = {
        "snapshot": "vllm snapshot needs",
        "template-engine": "be forked",
        "parked": "needs an NVIDIA driver",
    }
    for mode, reason in reasons.items():
        (launcher,) = launchers.create_launchers(SUBJECT, [mode], tmp_path)
        with pytest.raises(ModeUnavailableError, match=reason):
            launcher.prepare()
    assert calls() == []


CONSOLE = """
import json, os, sys
from pathlib import Path
log = Path(os.environ["XDG_RUNTIME_DIR"]) / "calls"
with log.open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(int(os.environ.get("FAKE_STATUS", "0")))
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """Replaces the console script by one that notes its arguments."""
    monkeypatch.setattr(launchers, "find_coldstart_command", lambda: [sys.executable, "-I", "-c", CONSOLE])
    path = tmp_path / "run" / "calls"
    return lambda: [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("mode", "level"),
    [
        ("template-runtime", "runtime"),
        ("standby", "asleep-1"),
        ("parked", "parked"),
        ("runtime-snapshot", ""),
    ],
)
def test_a_template_is_started_and_stopped_once(
    tmp_path: Path,
    calls: Callable[[], list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    level: str,
) -> None:
    monkeypatch.setattr(launchers.modes, "find_criu_limit", lambda mode: None)
    monkeypatch.setattr(launchers.runtime, "targets_cpu", lambda: not level)
    monkeypatch.setattr(nvml, "read_driver_version", lambda: "580.65.06")
    (template,) = launchers.create_launchers(SUBJECT, [mode], tmp_path)
    template.close()
    assert calls() == []
    template.prepare()
    template.close()
    template.close()
    started = ["template", "start", "tiny-llama", "--level", level, "--", "--max-model-len", "256"]
    stopped = ["template", "stop", "--level", level]
    assert calls() == ([started, stopped] if level else [["template", "freeze"]])


@pytest.mark.parametrize(("status", "error"), [("1", CommandFailedError), ("3", NoBundleError)])
def test_a_template_that_does_not_come_up(
    tmp_path: Path,
    calls: Callable[[], list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    error: type[Exception],
) -> None:
    monkeypatch.setenv("FAKE_STATUS", status)
    (template,) = launchers.create_launchers(SUBJECT, ["template-engine"], tmp_path)
    with pytest.raises(error, match=f"exited with code {status}"):
        template.prepare()
    template.close()
    assert len(calls()) == 1


def test_template_command_that_does_not_end_is_an_error_of_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["sh", "-c", "echo importing; exec sleep 60"]
    monkeypatch.setattr(launchers, "find_coldstart_command", lambda: words)
    monkeypatch.setattr(launchers, "PREPARE_TIMEOUT_S", 0.5)
    (template,) = launchers.create_launchers(SUBJECT, ["template-engine"], tmp_path)
    with pytest.raises(
        CommandFailedError, match=r"start did not end within 0\.5 s and was killed: importing"
    ):
        template.prepare()
