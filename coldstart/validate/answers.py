"""Ask servers a list of prompts, alone and with other requests in flight, and compare their greedy answers.

The response to a request alone must be equal to vLLM's response. With several requests in flight it may be any response
that vLLM gave to that prompt, alone or with other requests: milliseconds decide which requests share an iteration, and
the sums of a larger batch round differently. If vLLM's own responses to a prompt differ from token n on, a response
that differs from them at token n or later is a warning. A response that differs earlier is an error of the bundle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest
from pathlib import Path

from coldstart.artifacts import files
from coldstart.errors import UsageError, describe
from coldstart.launch.completions import Completion, CompletionClient
from coldstart.validate.checks import Finding
from coldstart.validate.launch import HOST, Launcher, serving

PROMPTS_HINT = "write one prompt per line"
PROMPTS = (
    "The quick brown fox",
    "In the beginning",
    "To start a server quickly, one has to",
    "1 2 3 4 5 6 7",
    "def main():",
    "Once upon a time there was a process",
    "Memory is",
    "A",
)


@dataclass(frozen=True)
class PromptSettings:
    """The requests of one server.

    `ready_timeout_s` is the time from the launch to the first token, in seconds. Each number in `crowds` is a number of
    requests in flight with which all prompts are asked again.
    """

    prompts: Sequence[str] = PROMPTS
    max_tokens: int = 64
    ready_timeout_s: float = 900.0
    crowds: Sequence[int] = ()


@dataclass(frozen=True)
class ServerAnswers:
    """The responses of one server, by the number of requests in flight, and the content of its ready file."""

    answers: Answers
    readiness: Mapping[str, object]


def collect_answers(launcher: Launcher, directory: Path, settings: PromptSettings) -> ServerAnswers:
    """Start a server, ask it, and stop it in every case.

    Raises ServerDiedError, or CommandFailedError where it gave no token in time or did not answer a request.
    """
    prompts, max_tokens = settings.prompts, settings.max_tokens
    with serving(launcher, directory) as server:
        client = CompletionClient(HOST, server.files.port, settings.ready_timeout_s)
        deadline_s = server.launched_s + settings.ready_timeout_s
        client.first_token(prompts[0], deadline_s=deadline_s, check=server.check)
        readiness = server.read_readiness()
        answers = {ALONE: ask_alone(client, prompts, max_tokens)}
        answers |= {count: ask_crowd(client, prompts, max_tokens, count) for count in settings.crowds}
        return ServerAnswers(answers, readiness)


def ask_alone(client: CompletionClient, prompts: Sequence[str], max_tokens: int) -> list[Answer]:
    """Ask the prompts one after the other. Raises NoAnswerError."""
    return [_answer(client.complete(prompt, max_tokens)) for prompt in prompts]


def ask_crowd(client: CompletionClient, prompts: Sequence[str], max_tokens: int, count: int) -> list[Answer]:
    """Ask with `count` requests in flight, with prompts repeated until there are as many. Raises NoAnswerError."""
    asked = [prompts[index % len(prompts)] for index in range(max(count, len(prompts)))]
    return [_answer(one) for one in client.complete_all(asked, max_tokens, count)]


def _answer(completion: Completion) -> Answer:
    return completion.tokens, completion.text


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read the prompts in their order. Raises UsageError for a file that cannot be read or holds no prompt, and for JSON."""
    if path.suffix == ".jsonl":
        raise UsageError(f"cannot read prompts from {path}: JSON lines are not supported", hint=PROMPTS_HINT)
    try:
        prompts = tuple(line for line in files.read_text(path).splitlines() if line.strip())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read prompts from {path}: {describe(error)}", hint=PROMPTS_HINT) from error
    if not prompts:
        raise UsageError(f"cannot read prompts from {path}: it holds no prompt", hint=PROMPTS_HINT)
    return prompts


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
