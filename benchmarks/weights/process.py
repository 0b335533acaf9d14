"""One start, as a process: imports, then (unless told to stop there) the weights into vLLM's model. Prints one JSON line.

With a launch plan in the environment that names their source the prefetcher is asked first, as `coldstart serve` does it
before it starts the server; the loader finds the request under way.

    python -m benchmarks.weights.process imports
    python -m benchmarks.weights.process LOAD_FORMAT MODEL_DIRECTORY [--digest]
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from coldstart.contract.plan import LaunchPlan


def main(wanted: list[str]) -> None:
    """Do one start."""
    with ExitStack() as leases:
        if asked := LaunchPlan.current().weights_from:
            from coldstart.weights.prefetch import client

            leases.enter_context(client.start_early(asked.source, asked.read()))
        from benchmarks.weights import engine

        engine.import_all()
        found: dict[str, Any] = {"imported_at_s": time.monotonic()}
        if wanted[0] != "imports":
            arguments = {"load_format": wanted[0]}
            found |= engine.load(Path(wanted[1]), arguments, look="--digest" in wanted)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
