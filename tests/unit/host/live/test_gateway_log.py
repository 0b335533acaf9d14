"""The host's log."""

from __future__ import annotations

import io
import json

from coldstart.host.live.log import Log


def test_log_is_json_without_secrets_and_never_fails() -> None:
    sink = io.StringIO()
    Log(sink).say("start", model="m", mode=None, url="http://me:geheim@host/x")
    line = json.loads(sink.getvalue())
    assert (line["event"], line["model"]) == ("start", "m") and "mode" not in line
    assert "geheim" not in sink.getvalue() and line["ts"].endswith("+00:00")
    sink.close()
    Log(sink).say("start", model="m")
