"""`coldstart fleet up` over model servers that need no model: the real process but for what starts them.

python -m support.fleet_up STATE RECORDING [RANKS [HOST [RAY]]]
"""

import json
import sys
from pathlib import Path
from typing import Any

from support.fleet_rig import record_decisions, tag

from coldstart.fleet.events import Action, Event
from coldstart.fleet.live import run
from coldstart.fleet.live.control import FleetControl
from coldstart.fleet.live.run import FleetUp
from coldstart.fleet.specification import FleetSettings
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.live.log import Log
from coldstart.system.paths import Cache


def record_to(file: str, now: float, event: Event, actions: list[Action]) -> None:
    """Append an event and its actions to a file, as one line of JSON."""
    line = {"now": now, "event": tag(event), "actions": [tag(one) for one in actions]}
    with Path(file).open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


def main(state: str, recording: str, ranks: str = "1", host: str = "127.0.0.1", ray: str = "") -> None:
    settings = FleetSettings(most_ranks=int(ranks), consolidate=ranks != "1", backoff_s=0.2)

    def create(*arguments: Any, **options: Any) -> FleetControl:
        control = FleetControl(*arguments, **options)
        record_decisions(control.core, lambda one: record_to(recording, *one))
        return control

    run.FleetControl = create  # type: ignore[misc, assignment]
    FleetUp(
        Cache.at(),
        settings,
        Log(),
        lambda place: print(json.dumps({"url": place.url, "ray": place.ray}), flush=True),
        state=Path(state),
        address=ray or None,
        endpoint=GatewayEndpoint(host, 0, insecure=True, allow_hosts=("*",)),
        server_factory="support.fleet_servers:FakeStarter",
    ).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
