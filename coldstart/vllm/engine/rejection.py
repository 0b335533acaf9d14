"""Recognize errors of vLLM that every start meets: invalid arguments, too little memory for them, or an unsupported model.

Such an error ends a start at once. Another start mode would repeat it. This module reads text alone: an error, or
the log of a process that could not report it. What crosses to another process is `Failure`, as data.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from coldstart.errors import CHECK_FAILED, ERROR, CommandFailedError
from coldstart.system import secrets

_Error = TypeVar("_Error", bound=CommandFailedError)
_LONGEST = 400
# vLLM's server raises this where the engine's process has logged the cause before.
_ENGINE_FAILED = "See root cause above"
# The first sentence of vLLM's message; its further ones name settings that no coldstart command has.
_SENTENCE = re.compile(r".+?\.(?=\s+[A-Z])")
_FAULT = re.compile(r"^(?:Value|Assertion) error, ")
_INVALID = "vLLM rejects its arguments: "
_SCARCE = "vLLM has too little memory for its arguments: "
_LIMIT_KV = "limit the KV cache: --kv-cache-memory-bytes 268435456, or use a smaller --gpu-memory-utilization"
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
        "raise --kv-cache-memory-bytes or --gpu-memory-utilization",
        CHECK_FAILED,
    ),
    (
        _SCARCE,
        re.compile(
            r"(To serve at least one request .+? larger than the available KV cache memory \([^)]*\)\.?)"
        ),
        "use a smaller --max-model-len or a larger --kv-cache-memory-bytes",
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
        "change the arguments of vLLM",
        ERROR,
    ),
    (
        _INVALID,
        re.compile(r"^\S+\.py: error: (.+)$", re.MULTILINE),
        "change the arguments of vLLM, which lists them: vllm serve --help=all",
        ERROR,
    ),
)


@dataclass(frozen=True)
class Failure:
    """Error that ends a process, for the process that started it.

    `is_final`: every start meets it. `is_consequence`: another process has reported the cause before.
    """

    message: str
    hint: str | None = None
    exit_code: int = CHECK_FAILED
    is_final: bool = False
    is_consequence: bool = False

    @classmethod
    def describe(cls, error: BaseException) -> Failure:
        """Describe an error in one line, without secrets."""
        text = secrets.redact_text(f"{type(error).__name__}: {' '.join(str(error).split())}")
        return find(text) or cls(text, is_consequence=_ENGINE_FAILED in text)

    def document(self) -> dict[str, Any]:
        """Return the failure as a JSON object, whose members are the arguments of a failure."""
        return asdict(self)

    def build_error(self, kind: type[_Error]) -> _Error:
        """Return the error of a final failure, after which no other start is tried."""
        error = kind(self.message, hint=self.hint, exit_code=self.exit_code)
        error.is_final = True
        return error


def find(text: str) -> Failure | None:
    """Return the error of these kinds in `text`, None if it contains another one or none."""
    for problem, pattern, hint, code in _KNOWN:
        if found := pattern.search(text):
            reason = _FAULT.sub("", " ".join(found[1].split()))
            sentence = _SENTENCE.match(reason)
            message = f"{problem}{secrets.redact_text(sentence[0] if sentence else reason)[:_LONGEST]}"
            return Failure(message, hint, code, is_final=True)
    return None
