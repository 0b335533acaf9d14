"""A stream that moves between two servers: in any order of events the client receives 0, 1, 2, ..."""

from __future__ import annotations

from random import Random

import pytest

from coldstart.fleet.handover import (
    Handover,
    HandoverPace,
    HandoverPhase,
    Means,
    Request,
    StreamSide,
    TokenGapError,
)


def test_one_move() -> None:
    stream = Handover(Request())
    assert [stream.token(StreamSide.GROUP, n) for n in range(3)] == [True] * 3
    assert stream.prepare(0.0, 10.0) and stream.ready() == 3
    assert stream.token(StreamSide.GROUP, 3), "it was on its way when the group was asked to stop"
    assert stream.drained(Means.KV) == 4 and stream.owner is StreamSide.WORKER
    assert not stream.token(StreamSide.GROUP, 4), "the group receives no request"
    assert not stream.token(StreamSide.WORKER, 3), "computed again, and sent before"
    assert stream.token(StreamSide.WORKER, 4)
    assert stream.phase is HandoverPhase.RESUMED and stream.is_settled and stream.sent == 5
    assert stream.failed() is None


def test_group_continues_at_the_source_after_the_deadline() -> None:
    stream = Handover(Request(), sent=7)
    stream.prepare(0.0, 10.0)
    stream.ready()
    stream.drained(Means.RECOMPUTE)
    assert stream.tick(9.9) is None and stream.tick(10.0) == 7
    assert stream.phase is HandoverPhase.ROLLED_BACK and stream.owner is StreamSide.GROUP
    assert not stream.token(StreamSide.WORKER, 7) and stream.token(StreamSide.GROUP, 7)
    assert stream.prepare(20.0, 10.0), "it may be tried again"


@pytest.mark.parametrize(
    "request_",
    [Request(choices=2), Request(logprobs=True), Request(structured=True), Request(seeded=True)],
)
def test_stream_without_a_reproducible_result_does_not_move(request_: Request) -> None:
    stream = Handover(request_)
    assert not stream.prepare(0.0, 1.0) and stream.phase is HandoverPhase.ATTACHED
    assert stream.ready() is None and stream.drained(Means.KV) is None


def test_skipped_token_is_detected() -> None:
    stream = Handover(Request())
    with pytest.raises(TokenGapError, match="sent token 1, expected token 0"):
        stream.token(StreamSide.GROUP, 1)


@pytest.mark.parametrize("seed", range(200))
def test_client_receives_each_token_once(seed: int) -> None:
    """Two servers generate the sequence from any start, with late messages and moves that fail at any time."""
    random, stream, client = Random(seed), Handover(Request()), list[int]()
    at = {StreamSide.GROUP: 0, StreamSide.WORKER: None}
    late: list[tuple[StreamSide, int]] = []
    now = 0.0
    while len(client) < 40:
        now += random.random()
        step = random.randrange(7)
        side = random.choice(list(StreamSide))
        if step <= 2 and (index := at[side]) is not None:
            late.append((side, index))
            at[side] = index + 1
        elif step == 3:
            stream.prepare(now, random.uniform(0.5, 20))
        elif step == 4 and stream.ready() is not None and random.random() < 0.8:
            # What the group had on its way comes first: its stream is in order.
            client += [n for s, n in late if stream.token(s, n)]
            late = []
            at[StreamSide.GROUP], at[StreamSide.WORKER] = None, stream.drained(random.choice(list(Means)))
        elif step == 5:
            back = stream.tick(now) if random.random() < 0.7 else stream.failed()
            if back is not None:
                at[StreamSide.WORKER], at[StreamSide.GROUP] = None, back
                late = [one for one in late if one[0] is StreamSide.WORKER]
        elif late:
            who, index = late.pop(0)
            client += [index] if stream.token(who, index) else []
    assert client == list(range(len(client)))


def test_more_move_at_once_while_none_waits_long_and_half_as_many_after_one_that_did() -> None:
    pace, seen = HandoverPace(target_s=0.35, most=4), []
    for gap_s in (0.1, 0.1, 0.35, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.36, 0.1, 0.4, 0.4):
        pace.moved(gap_s)
        seen.append(pace.at_once)
    assert seen == [2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 2, 2, 1, 1]
