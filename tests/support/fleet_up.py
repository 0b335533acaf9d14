"""`coldstart fleet up` over model servers that need no model: the real process but for what starts them.

python -m support.fleet_up STATE [RANKS [HOST [RAY]]]
"""

import json
import sys
from pathlib import Path

from coldstart.fleet.live.run import FleetUp
from coldstart.fleet.specification import FleetSettings
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.live.log import Log
from coldstart.system.paths import Cache


def main(state: str, ranks: str = "1", host: str = "127.0.0.1", ray: str = "") -> None:
    settings = FleetSettings(most_ranks=int(ranks), consolidate=ranks != "1", backoff_s=0.2)
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
