"""What a request says of its own length: the caller's guess, and the class it belongs to.

A caller gives its guess as vLLM's own extra argument: `"vllm_xargs": {"expected_output_tokens": 200}` in an OpenAI request. A
guess makes a class, which starts from what is guessed and goes on with what is learned of it: who guesses low and answers long
makes that class mistrusted.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

from vllm.v1.request import Request

from coldstart.scheduling.settings import ADAPTER, MAX_TOKENS, PREFIX

EXPECTED = "expected_output_tokens"


def expected_of(request: Request) -> int | None:
    """The caller's guess; None where there is none, or one that is no positive number."""
    given = request.sampling_params.extra_args if request.sampling_params is not None else None
    guess = (given or {}).get(EXPECTED)
    if isinstance(guess, bool) or not isinstance(guess, int | float) or not 1 <= guess < 1 << 30:
        return None
    return int(guess)


def kind_of_request(request: Request, classes: Collection[str]) -> Hashable:
    """The class of a request by those of its traits that `classes` names; None where it names none."""
    if not classes:
        return None
    adapter = request.lora_request.lora_name if ADAPTER in classes and request.lora_request else None
    prefix = request.block_hashes[0] if PREFIX in classes and request.block_hashes else None
    octave = request.max_tokens.bit_length() if MAX_TOKENS in classes else None
    return adapter, prefix, octave
