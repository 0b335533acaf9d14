"""The caller's guess and the class of a request, from vLLM's own request."""

from __future__ import annotations

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from coldstart.vllm.scheduling.hints import expected_of, kind_of_request

init_none_hash(sha256)


def request(
    given: object = None, *, tokens: int = 100, adapter: str | None = None, first: int = 1
) -> Request:
    extra = None if given is None else {"expected_output_tokens": given}
    return Request(
        "r",
        [first] * 9,
        SamplingParams(max_tokens=tokens, extra_args=extra),
        None,
        lora_request=LoRARequest(adapter, 1, "/nowhere") if adapter else None,
        block_hasher=get_request_block_hasher(4, sha256),
    )


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, None),
        (200, 200),
        (7.9, 7),
        (0, None),
        (-3, None),
        (True, None),
        ("9", None),
        (float("nan"), None),
    ],
)
def test_a_guess_is_taken_where_it_is_one(given: object, found: int | None) -> None:
    assert expected_of(request(given)) == found


def test_a_class_is_what_was_asked_to_make_one() -> None:
    plain = request()
    assert kind_of_request(plain, ()) is None
    assert kind_of_request(plain, ("max-tokens",)) == kind_of_request(
        request(tokens=127, first=2), ("max-tokens",)
    )
    assert kind_of_request(plain, ("max-tokens",)) != kind_of_request(request(tokens=128), ("max-tokens",))
    assert kind_of_request(plain, ("prefix",)) != kind_of_request(request(first=2), ("prefix",))
    assert kind_of_request(plain, ("prefix",)) == kind_of_request(request(tokens=5), ("prefix",))
    assert kind_of_request(plain, ("adapter",)) != kind_of_request(request(adapter="a"), ("adapter",))
