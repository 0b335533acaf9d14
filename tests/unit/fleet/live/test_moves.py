"""Streams that continue at another server: moved from a pipeline to a single worker, or resumed after a server died."""

import asyncio
import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.fake_model import generated
from support.fake_upstream import wait_until
from support.fleet_rig import FleetStage, deployment, fleet

from coldstart.contract import handover
from coldstart.fleet.specification import FleetSettings
from coldstart.weights.prefetch import client

PIPELINES = FleetSettings(most_ranks=2, backoff_s=0.02, backoff_max_s=0.05)
# Over one link ten bytes take two seconds, and the limit is less.
SLOW = {"settings": PIPELINES, "network": 5.0, "memory": 40}


def _ids(lines: list[bytes]) -> list[int]:
    """Return the tokens of a stream by its text, as a client reads it."""
    said = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert not [one for one in said if "error" in one], lines[-3:]
    assert lines[-1] == b"data: [DONE]"
    assert len({one["id"] for one in said}) == 1
    assert all(one["choices"][0]["token_ids"] is None for one in said if one["choices"])
    return [int(word) for one in said if one["choices"] for word in one["choices"][0]["text"].split()]


def _rank(server: Any) -> int:
    words = list(server.launch.args)
    return int(words[words.index("--node-rank") + 1])


async def _pipeline(stage: FleetStage, source: str | None = None) -> tuple[list[Any], Any]:
    """Start a serving pipeline of two ranks and the engine beside its first rank, which waits for its gate."""
    for node in stage.rig.nodes.values():
        node.servers.hold = True
    made = deployment("a", ttft_s=1.9, least=1, most=1, batch=200)
    stage.deploy(replace(made, launch=replace(made.launch, weights_from=source)))
    await wait_until(lambda: len(list(stage.rig.servers())) == 2)
    # The first rank is on the node that joined first, which need not be the rig's first.
    ranks = sorted(stage.rig.servers(), key=_rank)
    for rank in ranks:
        rank.gate.set()
    await wait_until(lambda: len(list(stage.rig.servers())) == 3)
    (beside,) = (server for server in stage.rig.servers() if server not in ranks)
    for node in stage.rig.nodes.values():
        node.servers.hold = False
    assert "--nnodes" in ranks[0].launch.args and "--nnodes" not in beside.launch.args
    sockets = [server.env["COLDSTART_WEIGHTS_SOCKET"] for server in (*ranks, beside)]
    assert sockets[0] == sockets[2] != sockets[1], "the full worker shares the weights of the rank beside it"
    return ranks, beside


async def test_full_worker_frees_what_it_loads_and_fetches_little_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "set_rate_limit", lambda _: None)
    async with fleet(tmp_path, **SLOW) as stage:  # type: ignore[arg-type]
        ranks, beside = await _pipeline(stage, "http://weights.example")
        limits = [
            (one.rate_limit.background, one.rate_limit.frees_loaded, one.rate_limit.most_held_bytes)
            for one in (*ranks, beside)
        ]
        # The rank has 5 of 10 bytes, which remain for the full worker; a twentieth of 10 is less than one.
        assert limits == [(False, False, None), (False, False, None), (True, True, 5)]


async def _stay(stage: FleetStage, pieces: int) -> tuple[list[Any], asyncio.Task[list[bytes]]]:
    """Start a stream that cannot move, and wait until its pipeline is to leave; return the ranks and the stream."""
    ranks, beside = await _pipeline(stage)
    # A stream in another format than vLLM's cannot be resumed.
    stays = asyncio.create_task(stage.events("a", "s", pieces=pieces, pause_s=0.02))
    await wait_until(lambda: ranks[0].asked)
    beside.gate.set()
    await wait_until(lambda: stage.rig.groups("leaving") == ["a#1"])
    return ranks, stays


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("usage", [pytest.param(False, marks=pytest.mark.nightly), True])
async def test_hundred_moved_streams_have_each_token_once(tmp_path: Path, usage: bool) -> None:
    async with fleet(tmp_path, **SLOW) as stage:  # type: ignore[arg-type]
        ranks, beside = await _pipeline(stage)
        # The pipeline takes minutes for what the worker has at once: on a busy machine too, no stream ends before it has moved.
        ranks[0].servers = replace(ranks[0].servers, pause_s=0.5)
        more = {"stream_options": {"include_usage": True}} if usage else {}
        asked = [
            asyncio.create_task(stage.events("a", f"p{n}", max_tokens=600, temperature=0, **more))
            for n in range(100)
        ]
        await wait_until(lambda: len(ranks[0].asked) == 100)
        beside.gate.set()
        for n, lines in enumerate(await asyncio.gather(*asked)):
            assert _ids(lines) == generated(f"p{n}", 600)
            if usage:
                counted = json.loads(lines[-2][6:])["usage"]
                assert (counted["prompt_tokens"], counted["completion_tokens"]) == (len(f"p{n}"), 600)
        assert stage.control.moves.moved_count == 100
        # The pipeline has stopped; the worker serves with the memory of one full model.
        await wait_until(lambda: all(rank.ended.done() for rank in ranks))
        assert stage.rig.groups() == ["a#2"]
        assert (await stage.ask("a", pieces=1))[0] == 200 and beside.asked[-1] == "x"
        control = stage.control
        await wait_until(lambda: sorted(s.free[0] for s in control.core.roster.servers.values()) == [30, 40])


@pytest.mark.parametrize(("held", "lost"), [(True, False), (True, True), (False, False)])
async def test_a_stream_moves_with_its_kv_where_the_pipeline_holds_it(
    tmp_path: Path, held: bool, lost: bool
) -> None:
    async with fleet(tmp_path, **SLOW) as stage:  # type: ignore[arg-type]
        ranks, beside = await _pipeline(stage)
        ranks[0].servers = replace(ranks[0].servers, pause_s=0.05, holds_kv=held)
        beside.servers = replace(beside.servers, loses_kv=lost)
        # The target may take most of the time limit to prepare, and as long again to continue the stream.
        stage.control.moves._clock = count(0.0, 45.0).__next__
        more = {"max_tokens": 300, "temperature": 0}
        moved = asyncio.create_task(stage.events("a", "stream", **more))
        facts = stage.control.facts.get_model("a")
        await wait_until(lambda: facts.chunks_streamed >= 3)
        beside.gate.set()
        assert _ids(await moved) == generated("stream", 300)
        moves, key = stage.control.moves, beside.env["COLDSTART_HANDOVER_KEY"]
        assert (moves.moved_count, moves.moved_with_kv) == (1, int(held and not lost))
        pulls = [handover.verify_and_decode(key, body.get(handover.PARAMETER)) for body in beside.bodies]
        # Once while the pipeline continues, and once for what it has computed meanwhile.
        assert [isinstance(one, handover.Pull) for one in pulls] == [held, held]
        pins = ranks[0].pins
        assert [pin.at_end for pin in pins] == [False, True][: 1 + held]
        assert all(pin.tokens >= len("stream") + 3 for pin in pins)
        known = [*b"stream", *generated("stream", 300)][: pins[-1].tokens]
        assert pins[-1].digest == handover.digest_tokens(known)
        assert ranks[0].env["COLDSTART_HANDOVER_KEY"] != key
        text = stage.control.metrics.format_text()
        assert f"coldstart_fleet_migrated_with_kv_total {float(held and not lost)}".encode() in text
        await wait_until(lambda: all(rank.ended.done() for rank in ranks))


async def test_sampled_stream_moves_after_tokens_that_arrived_together(tmp_path: Path) -> None:
    async with fleet(tmp_path, **SLOW) as stage:  # type: ignore[arg-type]
        ranks, beside = await _pipeline(stage)
        ranks[0].servers = replace(ranks[0].servers, pause_s=0.05, pairs=20)
        moved = asyncio.create_task(stage.events("a", "s", max_tokens=100))
        facts = stage.control.facts.get_model("a")
        await wait_until(lambda: facts.chunks_streamed >= 3)
        beside.gate.set()
        assert _ids(await moved) == generated("s", 100) and stage.control.moves.moved_count == 1
        await wait_until(lambda: all(rank.ended.done() for rank in ranks))


async def test_moves_whose_clients_left_give_way_to_the_next(tmp_path: Path) -> None:
    """A worker takes two streams at a time, and a move without an end would occupy it for a minute."""
    async with fleet(tmp_path, **SLOW) as stage:  # type: ignore[arg-type]
        ranks, beside = await _pipeline(stage)
        ranks[0].servers = replace(ranks[0].servers, pause_s=0.05)
        beside.servers = replace(beside.servers, pause_s=300.0)
        streams = [
            asyncio.create_task(stage.events("a", f"{n}", max_tokens=400, temperature=0)) for n in range(3)
        ]
        tickets = stage.control._tickets
        await wait_until(lambda: [one.response is not None for one in tickets.values()] == [True] * 3)
        beside.gate.set()
        await wait_until(lambda: sum(one.move is not None for one in tickets.values()) == 2)
        await wait_until(lambda: beside.generating == 2)
        moving = [one.continuation for one in tickets.values() if one.move is not None]
        beside.servers = replace(beside.servers, pause_s=0.0)
        for left in {int(stream.document["prompt"]) for stream in moving if stream is not None}:
            streams[left].cancel()
        (last,) = (stream for stream in streams if not stream.cancelling())
        assert len(_ids(await last)) == 400 and stage.control.moves.moved_count == 1


async def test_unmovable_stream_ends_in_the_pipeline(tmp_path: Path) -> None:
    async with fleet(tmp_path, **SLOW) as stage:  # type: ignore[arg-type]
        ranks, stays = await _stay(stage, 30)
        assert stage.rig.groups() == ["a#2"]
        lines = await stays
        assert len([one for one in lines if b"number" in one]) == 30 and lines[-1] == b"data: [DONE]"
        await wait_until(lambda: all(rank.ended.done() for rank in ranks))
        assert stage.control.moves.moved_count == 0 and stage.rig.groups() == ["a#2"]


async def test_worker_whose_engine_ended_before_the_switch_gets_no_request(tmp_path: Path) -> None:
    async with fleet(tmp_path, **SLOW) as stage:  # type: ignore[arg-type]
        for node in stage.rig.nodes.values():
            node.servers.hold = True
        stage.deploy(deployment("a", ttft_s=1.9, most=2, batch=3))
        prompts = [f"p{number}" for number in range(5)]
        streams = [
            asyncio.create_task(stage.events("a", prompt, max_tokens=40, temperature=0)) for prompt in prompts
        ]
        await wait_until(lambda: len(list(stage.rig.servers())) == 2)
        ranks = list(stage.rig.servers())
        for rank in ranks:
            rank.servers = replace(rank.servers, pause_s=0.05)
            rank.gate.set()
        await wait_until(lambda: len(list(stage.rig.servers())) == 4)
        ended, other = (server for server in stage.rig.servers() if server not in ranks)
        ended.gate.set()
        processes = stage.control.workers.processes
        await wait_until(lambda: any(one.rank.beside and one.up for one in processes.values()))
        ended.over.set()
        await wait_until(lambda: not any(one.rank.beside and one.up for one in processes.values()))
        other.gate.set()
        for prompt, lines in zip(prompts, await asyncio.gather(*streams), strict=True):
            assert _ids(lines) == generated(prompt, 40)
        assert (await stage.ask("a", pieces=1))[0] == 200
        await wait_until(lambda: all(rank.ended.done() for rank in ranks))
        assert len(stage.rig.groups()) == 1 and other.asked


@pytest.mark.parametrize("fault", [{"warming": 500}, {"break_after": 0}])
async def test_stream_refused_by_the_worker_continues_here(tmp_path: Path, fault: dict[str, int]) -> None:
    """The move is refused during its preparation, or fails after the pipeline has stopped the stream."""
    async with fleet(tmp_path, **SLOW) as stage:  # type: ignore[arg-type]
        ranks, beside = await _pipeline(stage)
        ranks[0].servers = replace(ranks[0].servers, pause_s=0.02)
        beside.servers = replace(beside.servers, **fault)
        moved = asyncio.create_task(stage.events("a", "s", max_tokens=60, temperature=0))
        streams = stage.control.facts.get_model("a")
        await wait_until(lambda: streams.chunks_streamed)
        beside.gate.set()
        assert _ids(await moved) == generated("s", 60) and stage.control.moves.moved_count == 0
        assert b"coldstart_fleet_migrations_failed_total 1.0" in stage.control.metrics.format_text()
        assert len(ranks[0].asked) == (1 if "warming" in fault else 2)
        await wait_until(lambda: all(rank.ended.done() for rank in ranks))


async def test_a_rank_that_dies_while_the_whole_model_serves_takes_only_the_pipeline(tmp_path: Path) -> None:
    async with fleet(tmp_path, **SLOW) as stage:  # type: ignore[arg-type]
        ranks, stays = await _stay(stage, 50_000)
        ranks[0].over.set()
        assert b"disconnected" in (await stays)[-1]
        await wait_until(lambda: all(rank.ended.done() for rank in ranks))
        await wait_until(lambda: not stage.rig.groups("leaving"))
        assert stage.rig.groups() == ["a#2"]
        assert (await stage.ask("a", pieces=1))[0] == 200 and len(list(stage.rig.servers())) == 3


async def test_a_rank_that_dies_while_the_whole_model_loads_takes_it_along(tmp_path: Path) -> None:
    async with fleet(tmp_path, **SLOW) as stage:  # type: ignore[arg-type]
        ranks, beside = await _pipeline(stage)
        ranks[0].over.set()
        await asyncio.gather(ranks[1].ended, beside.ended)
        control = stage.control
        await wait_until(lambda: "a#1" not in control.core.groups)
        assert (await stage.ask("a", pieces=1))[0] == 200


async def test_pipeline_is_unchanged_when_the_engine_beside_it_fails(tmp_path: Path) -> None:
    async with fleet(tmp_path, **SLOW) as stage:  # type: ignore[arg-type]
        ranks, beside = await _pipeline(stage)
        beside.over.set()
        await beside.ended
        assert (await stage.ask("a", pieces=1))[0] == 200
        assert stage.rig.groups() == ["a#1"] and ranks[0].asked


@pytest.mark.slow
async def test_restarted_fleet_finds_both_and_stops_the_pipeline(tmp_path: Path) -> None:
    async with fleet(tmp_path, **SLOW) as stage:  # type: ignore[arg-type]
        ranks, beside = await _pipeline(stage)
        stays = asyncio.create_task(stage.events("a", "s", pieces=50_000, pause_s=0.02))
        await wait_until(lambda: ranks[0].asked)
        beside.gate.set()
        await wait_until(lambda: stage.rig.groups("leaving") == ["a#1"])
        await stage.rig.kill()
        await stage.rig.revive()
        assert stage.rig.groups() == ["a#2"]
        await asyncio.wait([stays])
        await wait_until(lambda: all(rank.ended.done() for rank in ranks))
        assert len(list(stage.rig.servers())) == 3
        assert (await stage.ask("a", pieces=1))[0] == 200


async def test_stream_stopped_after_its_last_token_sends_no_request(tmp_path: Path) -> None:
    """The client first receives the tokens that arrived before the move; they may be all."""
    async with fleet(tmp_path) as stage:
        for node in stage.rig.nodes.values():
            node.servers.last_s = 30.0
        stage.deploy(deployment("a"))
        asked = asyncio.create_task(stage.events("a", "p", max_tokens=5, temperature=0))
        tickets = stage.control._tickets
        await wait_until(
            lambda: any(one.continuation and one.continuation.finished for one in tickets.values())
        )
        (ticket,) = tickets.values()
        assert ticket.response is not None
        ticket.response.interrupt()
        assert _ids(await asked) == generated("p", 5)
        (server,) = stage.rig.servers()
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("can_move", "words"),
    [
        (True, ()),
        (False, ()),
        (True, ("--kv-transfer-config", "{}")),
        (True, ("--kv-offloading-size", "1")),
        (True, ("--config", "own.yaml")),
        (True, ("--tensor-parallel-size", "2")),
    ],
)
async def test_drained_server_stops_when_its_streams_have_moved(
    tmp_path: Path, can_move: bool, words: tuple[str, ...]
) -> None:
    """Beside another KV connector, or where coldstart's cannot be used, the new worker computes the KV again."""
    async with fleet(tmp_path) as stage:
        for node in stage.rig.nodes.values():
            node.servers.pause_s = 0.02
        for node in stage.rig.nodes.values():
            node.servers.holds_kv = True
        stage.deploy(deployment("a", most=1, words=words))
        # A stream with a seed cannot be resumed.
        more: dict[str, Any] = {"temperature": 0} if can_move else {"seed": 1}
        asked = asyncio.create_task(stage.events("a", "p", max_tokens=100, **more))
        facts = stage.control.facts.get_model("a")
        await wait_until(lambda: facts.chunks_streamed >= 3)
        (first,) = stage.rig.servers()
        assert ('"host": "127.0.0.1"' in " ".join(first.launch.args)) is not bool(words)
        (worker,) = stage.control.core.groups["a#1"].workers
        stage.control.drain(worker.server)
        if can_move:
            await wait_until(first.ended.done)
            assert not asked.done(), "the worker stops before its stream would have ended"
        assert _ids(await asked) == generated("p", 100)
        await wait_until(first.ended.done)
        moves = stage.control.moves
        assert (moves.moved_count, moves.failed_count) == (int(can_move), 0)
        assert moves.moved_with_kv == int(can_move and not words)
        assert stage.control.readmitted_count == 0
        assert (await stage.ask("a", pieces=1))[0] == 200
        (group,) = stage.control.core.groups.values()
        assert group.workers[0].server != worker.server
