"""The list of start modes: every reader of the list includes an added mode."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.engines import FAKE

from coldstart.bench import run_order
from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.template_levels import LEVELS
from coldstart.errors import LaunchRefusedError, UsageError
from coldstart.host.launches import Launch
from coldstart.launch import ladder, modes, preparation, server_process
from coldstart.launch.modes import Reason, StartMode, await_ready
from coldstart.launch.request import ServeRequest, ServerStart
from coldstart.launch.server_process import Running
from coldstart.models.inspection import Lookup
from coldstart.system.probes import Probe
from coldstart.system.snapshot import criu

ROOT = Path(__file__).parents[3]
PLAN = LaunchPlan(Arguments(["serves", "--port", "7"]), canary={"prompt": [5], "tokens": [1]})


class ToyMode(StartMode):
    """Mode that starts a fake server with the process of the fresh mode."""

    def __init__(self, missing: Reason | None = None, refused: str = "") -> None:
        super().__init__("toy", loads_weights=False, probes=("toy probe",))
        self.missing, self.refused = missing, refused

    def unavailable(self, start: ServerStart | None = None) -> Reason | None:
        return self.missing

    def launch(self, start: ServerStart) -> Running:
        if self.refused:
            raise LaunchRefusedError(self.refused, "play again")
        return await_ready(start, server_process.fresh(start.plan))


@pytest.fixture
def start(
    start_server: Callable[..., ladder.StartedServer], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ladder.StartedServer]:
    """Return start(toy, mode), which starts with `toy` at the head of the list; servers are stopped afterwards."""

    def begin(toy: StartMode, mode: str = "toy") -> ladder.StartedServer:
        monkeypatch.setattr(modes, "LADDER", [toy, *modes.LADDER])
        return start_server(PLAN, mode)

    return begin


@pytest.mark.parametrize("mode", ["toy", "auto"])
def test_a_mode_starts_servers_when_it_is_in_the_list(
    start: Callable[..., ladder.StartedServer], mode: str
) -> None:
    document = start(ToyMode(), mode).document()
    assert document["mode"] == "toy" and document["fallbacks"] == document["absent"] == []


def test_a_mode_is_a_fallback_when_it_was_requested_and_is_unavailable(
    start: Callable[..., ladder.StartedServer],
) -> None:
    document = start(ToyMode(missing=Reason("no toy", "buy one"))).document()
    wanted = [{"section": "toy", "reason": "no toy", "hint": "buy one"}]
    assert document["mode"] == "fresh" and document["fallbacks"] == wanted and document["absent"] == []


def test_a_mode_is_a_fallback_when_it_refuses_under_auto(start: Callable[..., ladder.StartedServer]) -> None:
    document = start(ToyMode(refused="broken"), "auto").document()
    assert document["mode"] == "fresh" and document["fast_path"]["mode"] is False
    assert document["fallbacks"] == [{"section": "toy", "reason": "broken", "hint": "play again"}]


def test_the_doctor_lists_a_mode_when_it_is_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [Probe("vllm", "ok", "x", required=True), Probe("toy probe", "ok", "x")]
    monkeypatch.setattr(modes, "LADDER", [ToyMode(), *modes.LADDER])
    assert modes.list_permitted(results)["toy"] is True
    assert modes.list_permitted(results[:1])["toy"] is False
    monkeypatch.setattr(modes, "LADDER", [ToyMode(missing=Reason("no toy", "buy one"))])
    assert modes.list_reasons() == {"toy": Reason("no toy", "buy one")}


def test_dry_run_reports_that_criu_cannot_run(
    lookup: Lookup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = ToyMode()
    monkeypatch.setattr(modes, "LADDER", [toy, *modes.LADDER])
    monkeypatch.setenv(str(criu.VARIABLE), str(tmp_path / "absent"))
    assert ladder.find_mode(ServeRequest(lookup, mode="toy"), PLAN) == ("toy", [])
    monkeypatch.setattr(toy, "probes", ("criu",))
    mode, (skipped,) = ladder.find_mode(ServeRequest(lookup, mode="toy"), PLAN)
    assert mode == "fresh" and skipped.stage == "toy"
    assert skipped.reason.startswith(f"CRIU cannot run: {tmp_path / 'absent'} was not found")
    assert "build CRIU" in str(skipped.hint)


def test_the_command_line_offers_a_mode_when_it_is_in_the_list() -> None:
    code = (
        "from tests.unit.launch.test_modes import ToyMode\n"
        "from coldstart.launch import modes\n"
        "modes.LADDER.insert(0, ToyMode())\n"
        "from coldstart.commands.cli import main\n"
        "main(['serve', '--help'])\n"
    )
    paths = {"PYTHONPATH": f"{ROOT}:{FAKE.parents[1]}", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=paths, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "toy" in done.stdout and "template-engine" in done.stdout


def test_host_and_benchmark_use_the_modes_that_start_any_number_of_servers() -> None:
    assert set(run_order.MODES) == {*run_order.BASELINES, *modes.repeatable_names()}
    assert [Launch("m", "m", mode=name).mode for name in modes.repeatable_names()]
    with pytest.raises(UsageError, match="unknown mode 'standby'"):
        Launch("m", "m", mode="standby")


def test_every_template_level_has_one_mode() -> None:
    assert {level: preparation.find_mode(level).name for level in LEVELS} == {
        "runtime": "template-runtime",
        "engine": "template-engine",
        "asleep-1": "standby",
        "asleep-2": "standby",
    }
    with pytest.raises(UsageError, match="Unknown template level 'warm'"):
        preparation.find_mode("warm")
