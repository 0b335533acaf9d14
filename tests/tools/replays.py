"""A short trace that is replayed on a live gateway, and what its report must contain."""

import csv
import json
from typing import Any

from tools.machine import Machine

ROWS = 4
# No request on a CPU is that slow, and none is as fast as the other one.
MET, MISSED = "ttft=600,latency=900", "ttft=0.0001"


def check_replay(machine: Machine, url: str, *options: str) -> dict[str, Any]:
    """Replay on the server at `url` with a limit that all requests meet and one that none meets; return the first report."""
    rows = [
        {"timestamp": n * 50, "input_length": 9, "output_length": 4, "hash_ids": [n]} for n in range(ROWS)
    ]
    (machine.root / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for number, slo in enumerate((MET, MISSED)):
        exports = [
            f"--export={form}={machine.root}/replay-{number}.{form}" for form in ("json", "csv", "html")
        ]
        machine.run(
            "trace-replay",
            str(machine.root / "trace.jsonl"),
            "--target",
            url,
            "--slo",
            slo,
            *options,
            *exports,
        )
        found.append(json.loads((machine.root / f"replay-{number}.json").read_text()))
    met, missed = found
    assert (met["kind"], met["completed"], missed["completed"]) == ("live", ROWS, ROWS)
    assert (met["slo"]["attainment"], missed["slo"]["attainment"]) == (1.0, 0.0)
    assert met["goodput_per_s"] > 0 == missed["goodput_per_s"]
    assert met["slo"]["limits"] == {"all": {"ttft_s": 600.0, "latency_s": 900.0}}
    with (machine.root / "replay-0.csv").open() as table:
        requests = list(csv.DictReader(table))
    assert [int(one["output_tokens"]) for one in requests] == [4] * ROWS
    assert "TTFT" in (machine.root / "replay-0.html").read_text()
    return met
