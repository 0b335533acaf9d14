"""Ask one server a list of prompts, alone and with other requests in flight, and return its greedy answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coldstart.artifacts import files
from coldstart.errors import UsageError, describe
from coldstart.validate.completions import Completion, CompletionClient
from coldstart.validate.launch import HOST, Launcher, serving
from coldstart.validate.tokens import ALONE, Answer, Answers

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
