"""Migration of streams with their KV cache to another server of their model (ParaServe, section 6.2).

A fleet migrates the streams of a pipeline or of a drained server, and a host those of a server that it replaces.

The target loads the KV of the tokens generated so far while the source continues. After the source has stopped the
stream, the target loads the KV of the last tokens along with the rest of the request. If there is no KV, the target
recomputes the tokens. A stream that cannot be migrated, or whose migration fails, continues at the source.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from hashlib import blake2b

from coldstart.contract import environment, handover
from coldstart.contract.arguments import group_by_flag
from coldstart.host.launches import Launch
from coldstart.host.live.continuation import Continuation
from coldstart.host.live.log import BackgroundTasks, Log
from coldstart.host.live.messages import build_auth_header
from coldstart.host.live.request_router import MovingStream, Ticket
from coldstart.host.live.upstream import Replica
from coldstart.launch.scheduler import reserve_cores
from coldstart.system.secrets import drop_secret_options
from coldstart.vllm.handover import can_hand_over, handover_arguments

MOVE_TIMEOUT_S = 60.0
# The source responds in its next iteration. If a full batch delays it, the target recomputes the tokens.
HOLD_TIMEOUT_S = 5.0
JSON_HEADERS = ((b"content-type", b"application/json"),)
# Arguments that change neither the values of a KV cache nor their order. Others do, such as --max-model-len for some models
# with long contexts.
_WITHOUT_EFFECT_ON_KV = """api_key api_server_count async_scheduling chat_template enable_log_requests enable_prefix_caching
    gpu_memory_utilization headless kv_cache_memory_bytes master_addr master_port max_num_batched_tokens max_num_seqs nnodes
    node_rank pipeline_parallel_size scheduling_policy served_model_name uvicorn_log_level"""


def enable_handover(launch: Launch, host: str, *, on_cpu: bool) -> tuple[list[str], str, dict[str, str]]:
    """Return what a server needs to move streams with their KV: its vLLM arguments, its handover key and its environment.

    Its data ports listen at the address `host`. All three are empty if `launch` has arguments that do not allow it.
    """
    if not can_hand_over(launch.args):
        return [], "", {}
    # Each server has its own key, which no client knows.
    key = secrets.token_hex(32)
    env = {str(environment.HANDOVER_KEY): key}
    if on_cpu:
        env |= reserve_cores(launch.args.ranks_per_node())
    return handover_arguments(host, _identify_kv(launch)), key, env


def _identify_kv(launch: Launch) -> str:
    """Return a value that is equal for servers with interchangeable KV. All users can read it, so it depends on no secret."""
    ignored, given = frozenset(_WITHOUT_EFFECT_ON_KV.split()), drop_secret_options(launch.args)
    flags = [flag for flag in group_by_flag(given) if flag[0] not in ignored]
    return blake2b(repr((launch.model, launch.revision, flags)).encode(), digest_size=16).hexdigest()


class Moves:
    """Stream migrations of a gateway.

    `moved_count` migrations succeeded, `moved_with_kv` of them with the KV cache, and `failed_count` failed. `tickets` maps
    request numbers to the open requests. `ended` is called after each migration with the request number and whether it
    succeeded.
    """

    def __init__(
        self,
        tickets: Mapping[str, Ticket],
        ended: Callable[[str, bool], None],
        clock: Callable[[], float],
        log: Log,
    ) -> None:
        self.moved_count = self.moved_with_kv = self.failed_count = 0
        self._tickets, self._ended, self._clock = tickets, ended, clock
        self._log, self._tasks = log, BackgroundTasks(log)

    def schedule_move(self, ticket: Ticket, target: Replica) -> None:
        """Migrate the stream of a request as soon as the target has a free slot."""
        self._tasks.spawn(self._move_in_turn(ticket, target))

    async def _move_in_turn(self, ticket: Ticket, target: Replica) -> None:
        async with target.move_slots:
            done = self._is_open(ticket) and await self._move(ticket, target)
        if self._is_open(ticket):
            self._ended(ticket.ticket_id, done)

    def _is_open(self, ticket: Ticket) -> bool:
        return self._tickets.get(ticket.ticket_id) is ticket

    async def _move(self, ticket: Ticket, target: Replica) -> bool:
        source, stream, deadline = ticket.target, ticket.continuation, self._clock() + MOVE_TIMEOUT_S
        if source is None or stream is None or ticket.response is None:
            self._log.write(
                "not moved", request=ticket.ticket_id, reason="another server cannot resume the stream"
            )
            return False
        kv = await self._hold_kv(ticket, source, target, stream)
        if (
            stream.prompt is not None
            and await self._complete(target, stream.build_warmup_request(kv), MOVE_TIMEOUT_S) is None
        ):
            return self._record_failed_move(
                ticket, "the new server did not prefill the tokens generated so far"
            )
        if kv is not None:
            kv = await self._hold_kv(ticket, source, target, stream)
        if not self._is_open(ticket) or stream.finished or not stream.is_resumable:
            return False
        stream.kv = kv
        generated, stopped_s = len(stream.tokens), self._clock()
        settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        ticket.move = MovingStream(target, settled)
        ticket.response.interrupt()
        await asyncio.wait([settled], timeout=max(0.0, deadline - stopped_s))
        if not settled.done():
            self.roll_back(ticket, "the new server did not continue the stream in time")
            ticket.response.interrupt()
        ticket.move = None
        if settled.result():
            self.moved_count += 1
            self.moved_with_kv += kv is not None
            gap = round(self._clock() - stopped_s, 4)
            self._log.write(
                "moved", request=ticket.ticket_id, made=generated, gap_s=gap, with_kv=kv is not None
            )
        return settled.result()

    def _record_failed_move(self, ticket: Ticket, reason: str) -> bool:
        self.failed_count += 1
        self._log.write("not moved", request=ticket.ticket_id, reason=reason)
        return False

    async def _hold_kv(
        self, ticket: Ticket, source: Replica, target: Replica, stream: Continuation
    ) -> dict[str, str] | None:
        """Make the source retain the stream's KV. Return the transfer parameters for the target, or None if this fails."""
        if stream.prompt is None or not (source.handover_key and target.handover_key):
            return None
        body = stream.build_pin_request(ticket.request_id, source.handover_key)
        response = await self._complete(source, body, HOLD_TIMEOUT_S)
        reason = "the server did not retain the KV"
        try:
            given = json.loads(response or b"{}").get(handover.PARAMETER)
            if (pull := handover.verify_and_decode(source.handover_key, given)) is not None:
                return handover.sign(target.handover_key, pull)
        except (ValueError, AttributeError) as error:
            reason = str(error)
        self._log.write("kv not held", request=ticket.ticket_id, reason=reason)
        return None

    @staticmethod
    async def _complete(replica: Replica, body: bytes, limit_s: float) -> bytes | None:
        """Return the response of `replica` to a completion request, or None if it fails or takes over `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s):
                own = [*JSON_HEADERS, *build_auth_header(replica.key)]
                asked = await replica.upstream.request("POST", "/v1/completions", headers=own, body=body)
                async with asked as answer:
                    read = await answer.read()
                    return read if answer.status == 200 else None
        except OSError:  # includes TimeoutError
            return None

    def roll_back(self, ticket: Ticket, reason: str) -> bool:
        """Roll back a migration whose target failed before its first token. Return whether a migration was in progress."""
        move = ticket.move
        if move is None or move.settled.done():
            return False
        self._record_failed_move(ticket, reason)
        move.settled.set_result(False)
        assert ticket.target is not None
        ticket.grant(ticket.target)
        return True

    def end_move(self, ticket: Ticket) -> None:
        """End the migration of a request that has ended or was sent to another group."""
        if ticket.move is not None and not ticket.move.settled.done():
            ticket.move.settled.set_result(False)

    def close(self) -> None:
        """Cancel all migrations."""
        self._tasks.cancel()
