"""Migration of streams with their KV cache to another server of their model (ParaServe, section 6.2).

A fleet migrates the streams of a pipeline or of a drained server, and a host those of a server that it replaces.

The target loads the KV of the tokens generated so far while the source continues. After the source has stopped the
stream, the target loads the KV of the tokens since then along with the rest of the request. If there is no KV, the target
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
from coldstart.contract.handover import Pull
from coldstart.host.launches import Launch
from coldstart.host.live.continuation import Continuation
from coldstart.host.live.log import BackgroundTasks, Log
from coldstart.host.live.messages import build_auth_header
from coldstart.host.live.request_router import MovingStream, Ticket
from coldstart.host.live.upstream import Replica
from coldstart.launch.scheduler import reserve_cores
from coldstart.system.secrets import drop_secret_options
from coldstart.vllm.handover import can_hand_over, handover_arguments

# Each of the two steps of a move may take this long: the warm-up of the target, and its first token.
MOVE_TIMEOUT_S = 60.0
# The source responds in its next iteration. If a full batch delays it, the target recomputes the tokens.
HOLD_TIMEOUT_S = 5.0
TEXT_TIMEOUT_S, TEXT_POLL_S = 2.0, 0.005
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

    `moved_count` migrations succeeded, and `failed_count` failed. In `moved_with_kv` of the former, the target loaded the KV
    cache. `tickets` maps request numbers to the open requests. `ended` is called after each migration with the request
    number and whether it succeeded.
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
        source, stream = ticket.target, ticket.continuation
        if source is None or stream is None or ticket.response is None:
            self._log.write(
                "not moved", request=ticket.ticket_id, reason="another server cannot resume the stream"
            )
            return False
        pull = await self._hold_kv(ticket, source, target, stream, at_end=False)
        kv = None if pull is None else handover.sign(target.handover_key, pull)
        if (
            stream.prompt is not None
            and await self._complete(target, stream.build_warmup_request(kv), MOVE_TIMEOUT_S) is None
        ):
            return self._record_failed_move(
                ticket, "the new server did not prefill the tokens generated so far"
            )
        if pull is not None:
            pull = await self._hold_kv(ticket, source, target, stream, at_end=True)
        # Several tokens that arrive together share one text. A sampled stream can stop only after a token with its own text.
        patience = self._clock() + TEXT_TIMEOUT_S
        while self._is_open(ticket) and not (stream.finished or stream.is_resumable):
            if self._clock() > patience:
                return self._record_failed_move(
                    ticket, "the client already has part of the text that comes next"
                )
            await asyncio.sleep(TEXT_POLL_S)
        if not self._is_open(ticket) or stream.finished:
            return False
        stream.kv = None if pull is None else handover.sign(target.handover_key, pull)
        generated, stopped_s = len(stream.tokens), self._clock()
        settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        ticket.move = MovingStream(target, settled)
        ticket.response.interrupt()
        await asyncio.wait([settled], timeout=MOVE_TIMEOUT_S)
        if not settled.done():
            self.roll_back(ticket, "the new server did not continue the stream in time")
            ticket.response.interrupt()
        ticket.move = None
        if settled.result():
            self.moved_count += 1
            gap = round(self._clock() - stopped_s, 4)
            with_kv = pull is not None and await self._has_loaded(target, stream, pull)
            self.moved_with_kv += with_kv
            self._log.write("moved", request=ticket.ticket_id, made=generated, gap_s=gap, with_kv=with_kv)
        return settled.result()

    async def _has_loaded(self, target: Replica, stream: Continuation, pull: Pull) -> bool:
        """Return whether the target reports that it loaded the KV that `pull` names. Otherwise, it recomputed the tokens."""
        query = stream.build_message_request(target.handover_key, handover.LoadQuery(pull.pin))
        response = await self._complete(target, query, HOLD_TIMEOUT_S)
        message, _ = _decode(target.handover_key, response)
        return isinstance(message, handover.LoadResult) and message.loaded

    def _record_failed_move(self, ticket: Ticket, reason: str) -> bool:
        self.failed_count += 1
        self._log.write("not moved", request=ticket.ticket_id, reason=reason)
        return False

    async def _hold_kv(
        self, ticket: Ticket, source: Replica, target: Replica, stream: Continuation, *, at_end: bool
    ) -> Pull | None:
        """Make the source retain the stream's KV, now or when it ends there. Return None if it does not."""
        if stream.prompt is None or not (source.handover_key and target.handover_key):
            return None
        body = stream.build_pin_request(ticket.request_id, source.handover_key, at_end=at_end)
        response = await self._complete(source, body, HOLD_TIMEOUT_S)
        message, reason = _decode(source.handover_key, response)
        if isinstance(message, Pull):
            return message
        reason = reason or "the server did not retain the KV"
        self._log.write("kv not held", request=ticket.ticket_id, reason=reason)
        return None

    @staticmethod
    async def _complete(replica: Replica, body: bytes, limit_s: float) -> bytes | None:
        """Return the response of `replica` to a completion request, or None if it fails or takes over `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s):
                own = [(b"content-type", b"application/json"), *build_auth_header(replica.key)]
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


def _decode(key: str, response: bytes | None) -> tuple[handover.Message | None, str]:
    """Return the handover message in a server's response, or None and the reason why it has no valid one."""
    try:
        return handover.verify_and_decode(key, json.loads(response or b"{}").get(handover.PARAMETER)), ""
    except (ValueError, AttributeError) as error:
        return None, str(error)
