"""Streams over servers that need no model, half of whose clients go in the middle: does any get another's pieces?"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import psutil


async def streams(count: int) -> dict[str, Any]:
    """The gateway, the servers and the clients are one process, 200 streams at a time over two models."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from support.fake_upstream import staged, until

    chance, gates, ended = Random(17), asyncio.Semaphore(200), {"whole": 0, "left": 0, "mixed": 0}

    async def one(stage: Any, number: int) -> None:
        model, leaves_at = chance.choice("ab"), chance.choice((None, chance.randrange(20)))
        prompt, seen = f"{model}-{number}", 0
        async with (
            gates,
            stage.post(model=model, prompt=prompt, stream=True, pieces=20, pause_s=0.001) as answer,
        ):
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                if json.loads(line.removeprefix(b"data: ")) != {"prompt": prompt, "number": seen}:
                    ended["mixed"] += 1
                seen += 1
                if leaves_at is not None and seen > leaves_at:
                    break
        ended["left" if leaves_at is not None else "whole" if seen == 20 else "mixed"] += 1

    own = psutil.Process()
    with tempfile.TemporaryDirectory() as directory:
        async with staged(Path(directory), memory=20, max_held=1000) as stage:
            await asyncio.gather(*(one(stage, number) for number in range(500)))
            await until(stage.idle)
            ended.update(dict.fromkeys(ended, 0))
            before = {
                "descriptors": own.num_fds(),
                "tasks": len(asyncio.all_tasks()),
                "bytes": own.memory_info().rss,
            }
            await asyncio.gather(*(one(stage, number) for number in range(count)))
            await until(stage.idle)
            # Idle connections are kept for a while.
            await asyncio.sleep(12.0)
            after = {
                "descriptors": own.num_fds(),
                "tasks": len(asyncio.all_tasks()),
                "bytes": own.memory_info().rss,
            }
    return {"streams": count, **ended, "after_500_streams": before, "after_all": after}
