"""Escape sequences from a registry, a weights server or a bundle do not reach the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coldstart.artifacts.key import Key
from coldstart.artifacts.store import Store
from tools.bundles import key, publish
from tools.raw_server import answer, answering
from tools.shell import Run

from coldstart.system.paths import Cache

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
