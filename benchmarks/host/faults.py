"""A server killed in mid-stream, a model that always fails, and reloads, each beside streams that go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from typing import Any

from benchmarks.host.servers import ARGS, MODELS, PROMPT, Live, hosting, stream, table


async def faults() -> dict[str, Any]:
    """A server killed in mid-stream, a model that always fails, and reloads, each beside streams that go on."""
    models: dict[str, Any] = {name: {"args": ARGS, "memory": "1GiB", "start_s": 1.0} for name in MODELS}
    models["broken"] = {"model": "/nowhere/at/all", "memory": "1GiB", "start_s": 1.0}
    async with hosting(table(models, memory="4GiB", backoff_s=0.2, runtime_template=False)) as live:
        for name in MODELS:
            assert (await live.ask(name))[0] == 200
        return {
            "server_killed": await _killed(live),
            "always_fails": await _failing(live),
            "reload_under_load": await _reloaded(live, models),
        }


async def _bystanders(live: Live, count: int) -> dict[str, int]:
    """Streams of tiny-llama while something happens elsewhere; how many were whole."""
    made = await asyncio.gather(
        *(stream(live.client, live.url, 100) for _ in range(count)), return_exceptions=True
    )
    whole = sum(not isinstance(one, BaseException) for one in made)
    return {"streams": count, "whole": whole}


async def _killed(live: Live) -> dict[str, Any]:
    beside = asyncio.create_task(_bystanders(live, 8))
    body = {"model": "tiny-qwen2", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    lines: list[bytes] = []
    async with live.client.post(live.url + "/v1/completions", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: "):
                lines.append(line)
            if len(lines) == 5:
                said = await live.status()
                os.kill(next(m["pid"] for m in said["models"] if m["name"] == "tiny-qwen2"), signal.SIGKILL)
    await live.wait_until(lambda said: said["models"][1]["state"] == "failed")
    again, tried = 503, 0
    while again == 503:
        tried += 1
        await asyncio.sleep(0.1)
        again = (await live.ask("tiny-qwen2"))[0]
    return {
        "error_event": json.loads(lines[-1].removeprefix(b"data: ")).get("error"),
        "said_done": b"[DONE]" in b"".join(lines),
        "asked_until_it_served_again": tried,
        "status_then": again,
        "bystanders": await beside,
    }


async def _failing(live: Live) -> dict[str, Any]:
    beside = asyncio.create_task(_bystanders(live, 8))
    answers = []
    for _ in range(20):
        answers.append(await live.ask("broken"))
        await asyncio.sleep(0.1)
    return {
        "statuses": sorted({status for status, _ in answers}),
        "reason": answers[0][1]["error"]["message"],
        "starts_tried": next(m["failures"] for m in (await live.status())["models"] if m["name"] == "broken"),
        "bystanders": await beside,
    }


async def _reloaded(live: Live, models: Mapping[str, Any]) -> dict[str, Any]:
    beside = asyncio.create_task(_bystanders(live, 24))
    before = (await live.status())["starts"]["total"]
    for number in range(10):
        live.file.write_text(table(models, memory=f"{4 + number}GiB", backoff_s=0.2, runtime_template=False))
        live.process.send_signal(signal.SIGHUP)
        await live.wait_until(lambda said, number=number: said["host"]["memory_bytes"] == (4 + number) << 30)
    bystanders = await beside
    after = (await live.status())["starts"]["total"]
    return {"reloads": 10, "bystanders": bystanders, "starts_meanwhile": after - before}
