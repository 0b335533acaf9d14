"""First difference between two answers, and findings about the bundle."""

import pytest

from coldstart.validate.answers import Answer, Parting, compare, part


def answer(*tokens: int) -> Answer:
    return tokens, " ".join(map(str, tokens))


@pytest.mark.parametrize(
    ("ours", "theirs", "parting"),
    [
        (answer(1, 2, 3), answer(1, 5, 3), Parting(1, "2", "5")),
        (answer(4), answer(1), Parting(0, "4", "1")),
        (answer(1, 2), answer(1, 2, 3), Parting(2, "its end", "3")),
        (((), "ab"), ((), "ac"), Parting(1, "'b'", "'c'")),
        (((1,), "ab"), ((), "ab"), None),
        (answer(1, 2), answer(1, 2), None),
    ],
)
def test_difference_has_position_and_both_tokens(
    ours: Answer, theirs: Answer, parting: Parting | None
) -> None:
    assert part(ours, theirs) == parting


def test_concurrent_answer_may_equal_any_answer_of_vllm() -> None:
    plain = {1: [answer(1, 2, 3)], 2: [answer(1, 9, 9), answer(1, 2, 3)]}
    assert compare(("one",), {1: plain[1], 2: [answer(1, 9, 9), answer(1, 9, 9)]}, plain, "m") == []


def test_no_finding_after_vllm_differs_from_itself() -> None:
    plain = {1: [answer(1, 2, 3)], 2: [answer(1, 9, 9)] * 2}
    (found,) = compare(("one",), {1: plain[1], 2: [answer(1, 2, 4)] * 2}, plain, "m")
    assert (found.code, found.severity) == ("CS-REPLAY-UNSTABLE", "warning")
    assert "vLLM's own answers differ at token 1" in found.message


def test_finding_before_vllm_differs_from_itself() -> None:
    plain = {1: [answer(1, 2, 3)], 2: [answer(1, 9, 9)] * 2}
    (found,) = compare(("one",), {1: plain[1], 2: [answer(5, 2, 3)] * 2}, plain, "m")
    assert (found.code, found.subject) == ("CS-REPLAY", "tokens/prompt-1/2-at-once")
