"""Replacement for `tests/utils.py` of vLLM's source: a running server instead of one that each test file starts.

benchmarks/start/vllm_api_tests.py copies this file below the unpacked tests. It imports nothing of this project.
"""

from __future__ import annotations

import os
from typing import Any, Self

import anthropic
import openai

URL_VARIABLE = "SERVER_URL"
_ANSWER_S = 280


class RemoteOpenAIServer:
    """The server at `SERVER_URL`, with the methods that vLLM's tests call. Model and arguments are ignored."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.url_root = os.environ[URL_VARIABLE]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the server serves the next test file too."""

    def url_for(self, *parts: str) -> str:
        """Return the URL of a path."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        """Return OpenAI's client of the server."""
        return openai.OpenAI(base_url=self.url_for("v1"), **self._set(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Return OpenAI's asynchronous client of the server."""
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._set(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        """Return Anthropic's client of the server."""
        return anthropic.Anthropic(base_url=self.url_for(), **self._set(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """Return Anthropic's asynchronous client of the server."""
        return anthropic.AsyncAnthropic(base_url=self.url_for(), **self._set(options))

    def _set(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": _ANSWER_S, **options}
