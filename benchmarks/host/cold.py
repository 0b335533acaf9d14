"""Requests to a model that does not run: one start, all answered, in their order at the server."""

from __future__ import annotations

import asyncio
import re
import time
from itertools import pairwise
from typing import Any

from benchmarks.host.servers import ARGS, MODEL, hosting, own_directory, table


async def cold(requests: int) -> dict[str, Any]:
    """Requests to a model that does not run: one start, all answered, in their order at the server."""
    args = [*ARGS, "--enable-log-requests"]
    text = table({MODEL: {"args": args}}, memory="4GiB", max_held=1000, runtime_template=False)
    async with hosting(text) as live:
        began, asked = time.perf_counter(), []
        for number in range(requests):
            asked.append(asyncio.create_task(live.ask(str(number))))
            # So that they arrive one after the other: connections of one moment have no order.
            while (await live.status())["requests"]["total"] <= number:
                await asyncio.sleep(0)
        answers = await asyncio.gather(*asked)
        seconds = time.perf_counter() - began
        said = await live.status()
        (log,) = own_directory().glob("host-*/*.log")
        order = [int(n) for n in re.findall(r"Received request cmpl-(\d+)", log.read_text())]
        return {
            "requests": requests,
            "answered": sum(status == 200 for status, _ in answers),
            "starts": said["starts"]["total"],
            "seen_by_server": len(set(order)),
            "out_of_order_at_server": sum(a > b for a, b in pairwise(order)),
            "waited_for_the_start": requests - said["requests"]["hits"],
            "start": said["models"][0]["last_start"],
            "seconds": seconds,
        }
