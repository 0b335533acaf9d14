"""Recognize vLLM errors that would recur at every start: invalid arguments, too little memory, or an unsupported model.

Such an error ends the start, because another start mode would fail in the same way. vLLM's errors differ only in their text, so
they are recognized in the process in which they are raised. `StartFailure` passes them to another process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

from coldstart.contract.weights import LostWeightsError
from coldstart.errors import CHECK_FAILED, ERROR, CommandFailedError
from coldstart.system import secrets

_Error = TypeVar("_Error", bound=CommandFailedError)
_LONGEST = 400
# vLLM raises this in the server after the engine process, and in the engine after a rank's process, has logged the cause.
_PROCESS_FAILED = re.compile("See (?:root cause above|stack trace for root cause)")
# First sentence of vLLM's message; later sentences name settings that coldstart's commands do not have.
_SENTENCE = re.compile(r".+?\.(?=\s+[A-Z])")
_FAULT = re.compile(r"^(?:Value|Assertion) error, ")
_INVALID = "vLLM rejects its arguments: "
_SCARCE = "vLLM has too little memory for its arguments: "
_LIMIT_KV = "limit the KV cache: --kv-cache-memory-bytes 268435456, or use a smaller --gpu-memory-utilization"
# Prefix of the error, pattern of vLLM's message, hint, and exit code.
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
        "use a model that this version of vLLM supports, or another version of vLLM",
        CHECK_FAILED,
    ),
    (
        "vLLM cannot import the code of this model: ",
        re.compile(r"ModuleNotFoundError: (No module named '[^']+').*failed to be inspected", re.DOTALL),
        "install this package in the environment of vLLM",
        CHECK_FAILED,
    ),
    (
        _INVALID,
        re.compile(r"\d+ validation errors? for \w*(?:Config|Args)\s+(.+?)\s*\[type=", re.DOTALL),
        "change the vLLM arguments",
        ERROR,
    ),
)


class RejectedArgumentsError(ValueError):
    """Error for arguments that vLLM's parser rejects, with the parser's message."""


@dataclass(frozen=True)
class StartFailure:
    """Error that ended a server process, as it is reported to the process that started the server.

    `is_final` means that every start would fail with this error. `is_consequence` means that another process has already
    reported the cause. `lost_weights` means that the requested weights source failed.
    """

    message: str
    hint: str | None = None
    exit_code: int = CHECK_FAILED
    is_final: bool = False
    is_consequence: bool = False
    lost_weights: bool = False

    @classmethod
    def from_error(cls, error: BaseException) -> StartFailure:
        """Return the failure that describes an error, on one line and without secrets."""
        reason = " ".join(str(error).split())
        text = secrets.redact_text(f"{type(error).__name__}: {reason}")
        if _PROCESS_FAILED.search(text):
            hint = f"read the log; if memory ran out, {_LIMIT_KV}"
            return cls("a process of vLLM's engine was killed or crashed", hint, is_consequence=True)
        if isinstance(error, RejectedArgumentsError):
            hint = "change the vLLM arguments; list them with: vllm serve --help=all"
            return cls(f"{_INVALID}{secrets.redact_text(reason)}", hint, ERROR, is_final=True)
        return find_known_failure(text) or cls(text, lost_weights=isinstance(error, LostWeightsError))

    def build_error(self, error_class: type[_Error]) -> _Error:
        """Return an error of `error_class` that ends the start, so that no other start mode is tried."""
        error = error_class(self.message, hint=self.hint, exit_code=self.exit_code)
        error.is_final = True
        return error


def find_known_failure(text: str) -> StartFailure | None:
    """Return the failure whose message occurs in `text`, or None if `text` has no error that would recur at every start."""
    for problem, pattern, hint, code in _KNOWN:
        if found := pattern.search(text):
            reason = _FAULT.sub("", " ".join(found[1].split()))
            sentence = _SENTENCE.match(reason)
            message = f"{problem}{secrets.redact_text(sentence[0] if sentence else reason)[:_LONGEST]}"
            return StartFailure(message, hint, code, is_final=True)
    return None
