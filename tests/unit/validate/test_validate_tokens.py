"""First difference between two answers, and findings about the bundle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.validate.tokens import Answer, Parting, compare, part

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple)


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


@given(TOKENS, TOKENS)
def test_answers_are_equal_before_the_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    found = part((ours, ""), (theirs, ""))
    if found is None:
        assert ours == theirs
    else:
        assert ours[: found.at] == theirs[: found.at] and ours[: found.at + 1] != theirs[: found.at + 1]


def test_single_answer_must_equal_the_single_answer_of_vllm() -> None:
    other = answer(1, 9, 9)
    (found,) = compare(("one",), {1: [other]}, {1: [answer(1, 2, 3)], 2: [other, other]}, "m")
    assert found.code == "CS-REPLAY"


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
