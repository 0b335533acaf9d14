"""Recognize errors of vLLM that every start meets: invalid arguments, too little memory for them, or an unsupported model.

Such an error ends a start at once. Another start mode would repeat it. This module reads text alone: a log, or an error that
the server reported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

from coldstart.errors import CHECK_FAILED, ERROR, CommandFailedError
from coldstart.system import secrets

_Error = TypeVar("_Error", bound=CommandFailedError)
_LONGEST = 400
# The first sentence of vLLM's message; its further ones name settings that no coldstart command has.
_SENTENCE = re.compile(r".+?\.(?=\s+[A-Z])")
_FAULT = re.compile(r"^(?:Value|Assertion) error, ")
_INVALID = "vLLM rejects its arguments: "
_SCARCE = "vLLM has too little memory for its arguments: "
_LIMIT_KV = "limit the KV cache: --kv-cache-memory-bytes 268435456 after --, or use a smaller --gpu-memory-utilization"
# What failed, the message in vLLM's text, the hint, and the exit code.
_KNOWN = (
    (
        _SCARCE,
        re.compile(
            r"((?:Available memory on node|Free memory on device)"
            r" .+? is less than desired [CG]PU memory utilization \([^)]*\)\.?)"
        ),
        _LIMIT_KV,
        CHECK_FAILED,
    ),
    (
        _SCARCE,
        re.compile(r"(No available memory for the cache blocks\.?)"),
        "raise --kv-cache-memory-bytes or --gpu-memory-utilization after --",
        CHECK_FAILED,
    ),
    (
        _SCARCE,
        re.compile(
            r"(To serve at least one request .+? larger than the available KV cache memory \([^)]*\)\.?)"
        ),
        "use a smaller --max-model-len or a larger --kv-cache-memory-bytes after --",
        CHECK_FAILED,
    ),
    (
        "vLLM cannot run this model: ",
        re.compile(r"(Model architectures? \S.+? not supported\b[^.]*\.?)"),
        "choose a model, or a version of vLLM, from vLLM's list of supported models",
        CHECK_FAILED,
    ),
    (
        _INVALID,
        re.compile(r"\d+ validation errors? for \w*(?:Config|Args)\s+(.+?)\s*\[type=", re.DOTALL),
        "change the arguments after --",
        ERROR,
    ),
    (
        _INVALID,
        re.compile(r"^\S+\.py: error: (.+)$", re.MULTILINE),
        "change the arguments after --; vLLM lists its options: vllm serve --help=all",
        ERROR,
    ),
)


@dataclass(frozen=True)
class Rejection:
    """Error of vLLM in one line, a hint, and the exit code of the command."""

    message: str
    hint: str
    exit_code: int

    def build_error(self, kind: type[_Error]) -> _Error:
        """Return the error, after which no other start is tried."""
        error = kind(self.message, hint=self.hint, exit_code=self.exit_code)
        error.is_final = True
        return error


def find(text: str) -> Rejection | None:
    """Return the error of these kinds in `text`, None if it contains another one or none."""
    for problem, pattern, hint, code in _KNOWN:
        if found := pattern.search(text):
            reason = _FAULT.sub("", " ".join(found[1].split()))
            sentence = _SENTENCE.match(reason)
            return Rejection(
                f"{problem}{secrets.text(sentence[0] if sentence else reason)[:_LONGEST]}", hint, code
            )
    return None
