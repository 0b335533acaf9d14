"""Send prompts to servers, alone and concurrently, and compare their greedy responses.

A response to a lone request must equal vLLM's. A response to a concurrent request may equal any of vLLM's responses to
that prompt, lone or concurrent: timing decides which requests share an iteration, and batches of different sizes round
differently. If vLLM's own responses to a prompt diverge at token n, a divergence of the bundle at token n or later is a
warning. An earlier divergence is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product, zip_longest
from pathlib import Path

from coldstart.artifacts import files
from coldstart.errors import UsageError, describe_reason
from coldstart.launch.completions import CompletionClient
from coldstart.validate.checks import Finding
from coldstart.validate.launch import HOST, Launcher, run_server

PROMPTS_HINT = "specify a text file with one prompt per line"
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
    """Requests to send to each server.

    `ready_timeout_s` limits the time from launch to first token, in seconds. All prompts are sent again for each number
    of concurrent requests in `concurrency_levels`.
    """

    prompts: Sequence[str] = PROMPTS
    max_tokens: int = 64
    ready_timeout_s: float = 900.0
    concurrency_levels: Sequence[int] = ()


@dataclass(frozen=True)
class ServerResponses:
    """Responses of one server by number of concurrent requests, and the contents of its ready file."""

    responses: Responses
    readiness: Mapping[str, object]


def collect_responses(launcher: Launcher, directory: Path, settings: PromptSettings) -> ServerResponses:
    """Start a server, collect its responses, and stop it even after an error.

    Raises ServerExitedError, and CommandFailedError if the server returns no token in time or a request fails.
    """
    prompts, max_tokens = settings.prompts, settings.max_tokens
    with run_server(launcher, directory) as server:
        client = CompletionClient(HOST, server.files.port, settings.ready_timeout_s)
        deadline_s = server.launched_s + settings.ready_timeout_s
        client.await_first_token(prompts[0], deadline_s=deadline_s, check=server.check_alive)
        readiness = server.read_readiness()
        responses = {
            count: complete_prompts(client, prompts, max_tokens, count)
            for count in (ALONE, *settings.concurrency_levels)
        }
        return ServerResponses(responses, readiness)


def complete_prompts(
    client: CompletionClient, prompts: Sequence[str], max_tokens: int, count: int
) -> list[Response]:
    """Send `count` requests at a time, repeating prompts if necessary. Return the responses. Raises CompletionFailedError."""
    asked = [prompts[index % len(prompts)] for index in range(max(count, len(prompts)))]
    return [(one.tokens, one.text) for one in client.complete_all(asked, max_tokens, count)]


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read one prompt per line. Raises UsageError if the file is unreadable, has no prompts, or contains JSON lines."""
    if path.suffix == ".jsonl":
        raise UsageError(f"cannot read prompts from {path}: JSON lines are not supported", hint=PROMPTS_HINT)
    try:
        prompts = tuple(line for line in files.read_text(path).splitlines() if line.strip())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read prompts from {path}: {describe_reason(error)}", hint=PROMPTS_HINT
        ) from error
    if not prompts:
        raise UsageError(f"cannot read prompts from {path}: the file contains no prompt", hint=PROMPTS_HINT)
    return prompts


# Token ids (empty if the server does not report them), and text.
Response = tuple[tuple[int, ...], str]
# By number of concurrent requests. The response at index n belongs to prompt n modulo the number of prompts.
Responses = Mapping[int, Sequence[Response]]
HINT = "run `coldstart materialize {} --force`"
ALONE = 1
END_MARKER = "its end"


@dataclass(frozen=True, slots=True, order=True)
class Divergence:
    """First position (from 0) at which two responses differ, and the token or character that each response has there."""

    position: int
    actual_token: str
    expected_token: str


def find_divergence(actual: Response, expected: Response) -> Divergence | None:
    """Return the first divergence of two responses, in characters if one has no token IDs, or None if they are equal."""
    by_tokens = actual[0] and expected[0]
    pair = (actual[0], expected[0]) if by_tokens else (actual[1], expected[1])
    for position, (one, two) in enumerate(zip_longest(*pair)):
        if one != two:
            return Divergence(
                position,
                *(END_MARKER if it is None else str(it) if by_tokens else repr(it) for it in (one, two)),
            )
    return None


def compare_responses(
    prompts: Sequence[str], bundled: Responses, plain: Responses, name: str
) -> Iterator[Finding]:
    """Yield a finding for each prompt and concurrency level at which the bundle's responses differ from vLLM's."""
    for concurrency, (index, prompt) in product(sorted(bundled), enumerate(prompts)):
        of_prompt = slice(index, None, len(prompts))
        all_expected = {answer for answers in plain.values() for answer in answers[of_prompt]}
        expected = set(plain[ALONE][of_prompt]) if concurrency == ALONE else all_expected
        actual = bundled[concurrency][of_prompt]
        divergences = [
            _find_latest_divergence(answer, expected) for answer in actual if answer not in expected
        ]
        found = min((one for one in divergences if one is not None), default=None)
        if found is None:
            continue
        own_position = min(
            (one.position for pair in combinations(all_expected, 2) if (one := find_divergence(*pair))),
            default=None,
        )
        crowd = f" with {concurrency} concurrent requests" if concurrency != ALONE else ""
        subject = f"tokens/prompt-{index + 1}" + (f"/{concurrency}-at-once" if crowd else "")
        shown = prompt if len(prompt) <= 60 else prompt[:57] + "..."
        message = f"the response to prompt {index + 1}, {shown!r},{crowd} differs from vLLM's at token {found.position}: "
        message += f"{found.actual_token} instead of {found.expected_token}"
        if crowd and own_position is not None and found.position >= own_position:
            message += f"; vLLM's own responses to concurrent requests differ at token {own_position}"
            message += "; the bundle is not the cause"
            yield Finding("CS-REPLAY-UNSTABLE", "warning", message, "", subject)
        else:
            yield Finding("CS-REPLAY", "error", message, HINT.format(name), subject)


def _find_latest_divergence(answer: Response, expected: set[Response]) -> Divergence | None:
    """Return the divergence from the `expected` response with the longest common prefix, or None if one is equal."""
    divergences = [find_divergence(answer, other) for other in expected]
    return None if None in divergences else max(one for one in divergences if one is not None)
