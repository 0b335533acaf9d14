"""`coldstart fleet up` over model servers that need no model: the real process but for what starts them.

python -m support.fleet_up STATE RECORDING [RANKS [HOST [RAY]]]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from coldstart.fleet.live.run import FleetUp, FleetUpOptions
from coldstart.fleet.specification import FleetSettings
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.live.log import Log
from coldstart.system.paths import Cache


def main(state: str, recording: str, ranks: str = "1", host: str = "127.0.0.1", ray: str = "") -> None:
    settings = FleetSettings(most_ranks=int(ranks), consolidate=ranks != "1", backoff_s=0.2)
    options = FleetUpOptions(
        Cache.at(),
        settings,
        Path(state),
        None,
        ray or None,
        endpoint=GatewayEndpoint(host, 0, insecure=True, allow_hosts=("*",)),
        record=Path(recording),
        servers="support.fleet_servers:FakeStarter",
    )
    FleetUp(
        options, Log(), lambda place: print(json.dumps({"url": place.url, "ray": place.ray}), flush=True)
    ).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
