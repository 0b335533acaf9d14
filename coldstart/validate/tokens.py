"""Compare the greedy tokens of a bundle's server with those of an ordinary vLLM server.

The response to a request alone must be equal to vLLM's response. With several requests in flight it may be any response
that vLLM gave to that prompt, alone or with other requests: milliseconds decide which requests share an iteration, and
the sums of a larger batch round differently. If vLLM's own responses to a prompt differ from token n on, a response
that differs from them at token n or later is a warning. A response that differs earlier is an error of the bundle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest

from coldstart.artifacts.verify import Finding

# Token ids, and the text for a server that reports no ids.
Answer = tuple[tuple[int, ...], str]
# By number of requests in flight. The response at index n belongs to prompt n modulo the number of prompts.
Answers = Mapping[int, Sequence[Answer]]
HINT = "coldstart materialize {} --force"
ALONE = 1
END = "its end"


@dataclass(frozen=True, slots=True, order=True)
class Parting:
    """The first position (from 0) at which two responses differ, and the token or character of each."""

    at: int
    ours: str
    theirs: str


def part(ours: Answer, theirs: Answer) -> Parting | None:
    """Return where two responses differ, by characters if one has no token ids; None if they are equal."""
    by_tokens = ours[0] and theirs[0]
    pair = (ours[0], theirs[0]) if by_tokens else (ours[1], theirs[1])
    for at, (one, two) in enumerate(zip_longest(*pair)):
        if one != two:
            return Parting(
                at, *(END if it is None else str(it) if by_tokens else repr(it) for it in (one, two))
            )
    return None


def compare(prompts: Sequence[str], bundled: Answers, plain: Answers, name: str) -> list[Finding]:
    """Return one finding for each prompt and number of requests in flight with a wrong answer."""
    count = len(prompts)
    return [
        finding
        for at_once in sorted(bundled)
        for index, prompt in enumerate(prompts)
        for finding in _judge(
            index, prompt, at_once, bundled[at_once][index::count], _of(plain, index, count), name
        )
    ]


def _of(answers: Answers, index: int, count: int) -> dict[int, list[Answer]]:
    return {at_once: list(given[index::count]) for at_once, given in answers.items()}


def _judge(
    index: int,
    prompt: str,
    at_once: int,
    ours: Sequence[Answer],
    plain: Mapping[int, Sequence[Answer]],
    name: str,
) -> Iterator[Finding]:
    every = {answer for given in plain.values() for answer in given}
    theirs = set(plain[ALONE]) if at_once == ALONE else every
    partings = [_latest(answer, theirs) for answer in ours if answer not in theirs]
    found = min((one for one in partings if one is not None), default=None)
    if found is None:
        return
    own = min((one.at for pair in combinations(every, 2) if (one := part(*pair))), default=None)
    crowd = f" with {at_once} at once" if at_once != ALONE else ""
    subject = f"tokens/prompt-{index + 1}" + (f"/{at_once}-at-once" if crowd else "")
    message = f"the response to prompt {index + 1}, {_short(prompt)},{crowd} differs from vLLM's at token {found.at}: "
    message += f"{found.ours}, vLLM's is {found.theirs}"
    if crowd and own is not None and found.at >= own:
        message += f"; with other requests in flight vLLM's own answers differ at token {own}, so the bundle is not the cause"
        yield Finding("CS-REPLAY-UNSTABLE", "warning", message, "", subject)
    else:
        yield Finding("CS-REPLAY", "error", message, HINT.format(name), subject)


def _latest(answer: Answer, theirs: set[Answer]) -> Parting | None:
    """Return where a response differs from the reference that it agrees with longest."""
    partings = [part(answer, other) for other in theirs]
    return None if None in partings else max(one for one in partings if one is not None)


def _short(prompt: str, characters: int = 60) -> str:
    return repr(prompt if len(prompt) <= characters else prompt[: characters - 3] + "...")
