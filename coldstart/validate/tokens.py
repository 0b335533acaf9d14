"""Where the greedy tokens of a bundle's server part from those of an ordinary vLLM.

Alone, an answer has to be vLLM's own. Many at once it may be any that vLLM itself gave to that prompt, alone or with others:
which requests share an iteration is a matter of milliseconds, and the sums of a larger batch round otherwise. Where vLLM's own
answers part, one that parts from them no earlier says nothing of the bundle, and is reported as that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest

from coldstart.artifacts.verify import Finding

# Token ids, and the text where the server tells no ids.
Answer = tuple[tuple[int, ...], str]
# By the number of requests in flight; the answer at place n is that to prompt n, modulo the number of prompts.
Answers = Mapping[int, Sequence[Answer]]
MEND = "coldstart materialize {} --force"
ALONE = 1
END = "its end"


@dataclass(frozen=True, slots=True, order=True)
class Parting:
    """The first place (from 0) at which two answers are not the same, and what stands there in each."""

    at: int
    ours: str
    theirs: str


def part(ours: Answer, theirs: Answer) -> Parting | None:
    """Where two answers part; by characters where one of them has no token ids. None where they are one."""
    by_tokens = ours[0] and theirs[0]
    pair = (ours[0], theirs[0]) if by_tokens else (ours[1], theirs[1])
    for at, (one, two) in enumerate(zip_longest(*pair)):
        if one != two:
            return Parting(
                at, *(END if it is None else str(it) if by_tokens else repr(it) for it in (one, two))
            )
    return None


def compare(prompts: Sequence[str], bundled: Answers, plain: Answers, name: str) -> list[Finding]:
    """One finding for each prompt and number of requests at which an answer is not vLLM's."""
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
    message = (
        f"the answer to prompt {index + 1}, {_short(prompt)},{crowd} parts from vLLM's at token {found.at}: "
    )
    message += f"{found.ours}, vLLM's is {found.theirs}"
    if crowd and own is not None and found.at >= own:
        message += f"; with other requests beside it vLLM's own answers part at token {own}, so this says nothing of the bundle"
        yield Finding("CS-REPLAY-UNSTABLE", "warning", message, "", subject)
    else:
        yield Finding("CS-REPLAY", "error", message, MEND.format(name), subject)


def _latest(answer: Answer, theirs: set[Answer]) -> Parting | None:
    """Where it parts from the one that it follows longest."""
    partings = [part(answer, other) for other in theirs]
    return None if None in partings else max(one for one in partings if one is not None)


def _short(prompt: str, characters: int = 60) -> str:
    return repr(prompt if len(prompt) <= characters else prompt[: characters - 3] + "...")
