"""Continue a response stream on another server of its model.

Every request to vLLM has `return_token_ids` set. The token IDs are recorded here, and removed from the response unless
the client asked for them. The next server receives the IDs of the prompt and of the generated tokens through
/v1/completions. For a chat request, its response is converted to a chat response. With greedy sampling, the result is the
same as without a change of server. With unseeded sampling, the result has the same distribution, because the next token
depends only on the tokens before it.

Invariant: the client receives each token's text once and in order. A server's text may lag behind its tokens by an
incomplete character. The next server continues after the last token whose text was complete, and repeated text is
dropped. Repeated text must be identical, otherwise the stream ends with an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from coldstart.contract import handover
from coldstart.contract.arguments import Arguments
from coldstart.contract.handover import PARAMETER

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Parameters that the continuation request can contain unchanged, with any value.
_SAMPLING = """model stream stream_options max_tokens temperature top_p top_k min_p repetition_penalty logit_bias stop_token_ids
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens include_stop_str_in_output allowed_token_ids
    user priority session_id cache_salt length_penalty return_token_ids"""
# Parameters that affect only a chat's prompt, whose token IDs are known by then, and the name of max_tokens for chats.
_TEMPLATE = """messages add_special_tokens add_generation_prompt continue_final_message chat_template chat_template_kwargs
    documents max_completion_tokens"""
_SAME = frozenset(_SAMPLING.split())
_PROMPT = {COMPLETIONS: frozenset(("prompt", "add_special_tokens")), CHAT: frozenset(_TEMPLATE.split())}
# Parameters that have no effect with these values. The values are JSON text, because `0 == False` in Python.
_NEUTRAL: Mapping[str, tuple[str, ...]] = {
    "n": ("1",),
    "best_of": ("1",),
    "logprobs": ("false",),
    "top_logprobs": ("0",),
    "echo": ("false",),
    "use_beam_search": ("false",),
    "presence_penalty": ("0", "0.0"),
    "frequency_penalty": ("0", "0.0"),
    "stop": ("[]", '""'),
    "bad_words": ("[]",),
    "tools": ("[]",),
    "tool_choice": ('"none"',),
    "response_format": ('{"type": "text"}',),
    "logprob_token_ids": ("[]",),
    "parallel_tool_calls": ("true", "false"),
}
# Server arguments that make a chat response contain more than text.
_PARSERS = ("reasoning_parser", "tool_call_parser", "enable_auto_tool_choice")
_DEFAULT_TOKENS = 16  # vLLM's default for a completion without max_tokens


def find_unsupported(path: str, document: Mapping[str, Any], arguments: Arguments) -> str:
    """Return the path, request field or server argument that prevents a continuation, or "" if nothing prevents it."""
    if path not in _PROMPT:
        return path
    if path == CHAT and any(arguments.contains_flag(word) for word in _PARSERS):
        return "a reasoning or tool-call parser of the server"
    for name, value in document.items():
        if value is None or name in _SAME or name in _PROMPT[path]:
            continue
        if name == "seed" and document.get("temperature") == 0:
            continue
        if name not in _NEUTRAL or json.dumps(value) not in _NEUTRAL[name]:
            return name
    if path == COMPLETIONS:
        prompt = document.get("prompt")
        ids = isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt)
        return "" if ids or (isinstance(prompt, str) and prompt) else "prompt"
    messages = document.get("messages")
    return "" if isinstance(messages, list) and all(map(_text_only, messages)) else "messages"


def _text_only(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else message
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


class Continuation:
    """State of one response stream that can continue on another server.

    `tokens` are the token IDs generated so far. The client has received the complete text of the first `clean_count`
    tokens. If `kv` is set, it contains the KV transfer parameters with which the next server loads the KV cache of these
    tokens.
    """

    def __init__(self, path: str, document: Mapping[str, Any]) -> None:
        self.path, self.document = path, document
        self.prompt: list[int] | None = None
        self.tokens: list[int] = []
        self.clean_count = 0
        self.kv: Mapping[str, str] | None = None
        self.finished = self.ended = False
        self.error = ""
        self._greedy = document.get("temperature") == 0
        self._shows_ids = bool(document.get("return_token_ids"))
        self._head: dict[str, Any] = {}
        self._rest = b""
        self._later = self._diverged = self._foreign = False
        self._at = 0
        # Text that the client has and this server will repeat, and this server's text since token `clean_count`.
        self._ahead = self._since = ""

    @classmethod
    def create(cls, path: str, document: Mapping[str, Any], arguments: Arguments) -> Self | None:
        """Create a continuation, or return None if the stream cannot continue on another server."""
        return None if find_unsupported(path, document, arguments) else cls(path, document)

    @property
    def is_resumable(self) -> bool:
        """Return whether the stream can be resumed: another server can continue it, or the client already has all tokens."""
        if self._diverged or self._foreign:
            return False
        # Tokens after `clean_count` are sampled again, so the client must not have received any part of them.
        behind = self._shows_ids and len(self.tokens) > self.clean_count
        known = self._greedy or not (self._ahead or self._since or behind)
        return not self._head or self.finished or (self.prompt is not None and known)

    @property
    def is_over(self) -> bool:
        """Return whether the stream is complete: its last event has arrived, or its format is unknown."""
        return self.ended or self._foreign

    def build_next_request(self, path: str) -> tuple[str, bytes]:
        """Return path and body of the next request: first the client's own, later one that requests the remaining tokens."""
        self._rest, self.error = b"", ""
        if self.prompt is None:
            return path, self._body({**self.document, "return_token_ids": True})
        self._later, self._at = True, self.clean_count
        self._ahead, self._since = self._since + self._ahead, ""
        if not self._greedy:
            del self.tokens[self.clean_count :]
        return COMPLETIONS, self._body(self._remaining())

    def build_warmup_request(self, kv: Mapping[str, str] | None = None) -> bytes:
        """Build a one-token request that makes a server compute the KV cache of all tokens so far, or load it with `kv`."""
        more = {name: self.document[name] for name in ("cache_salt",) if name in self.document}
        return self._one_token(self._so_far(), more | ({} if kv is None else {PARAMETER: kv}))

    def build_pin_request(self, request: str, key: str, *, at_end: bool = False) -> bytes:
        """Build a completion request that makes the current server retain the KV cache of this stream.

        `request` is the stream's request ID at that server, whose handover key is `key`. With `at_end`, the server retains
        what the stream has when it is stopped there.
        """
        known = [*(self.prompt or ()), *self.tokens]
        pin = handover.Pin(request, len(known), handover.digest_tokens(known), at_end)
        return self.build_message_request(key, pin)

    def build_message_request(self, key: str, message: handover.Message) -> bytes:
        """Build a completion request that brings a message to a server whose handover key is `key`."""
        return self._one_token((self.prompt or [])[:1], {PARAMETER: handover.sign(key, message)})

    def _one_token(self, prompt: list[int], more: Mapping[str, Any]) -> bytes:
        asked = {"model": self.document["model"], "prompt": prompt, "max_tokens": 1, "temperature": 0}
        return self._body({**asked, **more})

    def _so_far(self) -> list[int]:
        return [*(self.prompt or ()), *self.tokens[: self.clean_count]]

    def _remaining(self) -> dict[str, Any]:
        given = self.document
        limit = given.get("max_completion_tokens") or given.get("max_tokens")
        if limit is None and self.path == COMPLETIONS and "max_tokens" not in given:
            limit = _DEFAULT_TOKENS
        asked = {name: value for name, value in given.items() if name in _SAME}
        asked |= {"prompt": self._so_far(), "stream": True, "return_token_ids": True}
        asked["max_tokens"] = None if limit is None else limit - self.clean_count
        if given.get("min_tokens"):
            asked["min_tokens"] = max(0, given["min_tokens"] - self.clean_count)
        if self.kv is not None:
            asked[PARAMETER], self.kv = self.kv, None
        return asked

    @staticmethod
    def _body(document: Mapping[str, Any]) -> bytes:
        return json.dumps(document).encode()

    def filter_chunk(self, chunk: bytes) -> bytes:
        """Return the complete events for the client. An incomplete event is buffered until the rest of it arrives.

        If the stream cannot continue with the output of this server, set `error`.
        """
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        passed = []
        for event in events:
            if self.error:
                break
            passed.append(self._event(event))
        return b"".join(passed)

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: "):
            return event + b"\n\n"
        if event == b"data: [DONE]":
            self.ended = self.finished or self._foreign
            self.error = "" if self.ended else "the stream ended before its last token"
            return event + b"\n\n" if self.ended else b""
        chunk = _completion(event[6:])
        if chunk is None:
            self._foreign = True
            return event + b"\n\n"
        if "error" in chunk:
            self.error = str(chunk["error"])[:200]
            return b""
        if any(choice.get("finish_reason") == "abort" for choice in chunk["choices"]):
            self.error = "the server aborted the stream when it shut down"
            return b""
        return self._written(chunk) if self._later else self._seen(chunk, event)

    def _seen(self, chunk: dict[str, Any], event: bytes) -> bytes:
        """Return an event of the first server without the fields that `return_token_ids` added, and record its tokens."""
        if not self._head:
            self._head = {name: chunk.get(name) for name in ("id", "object", "created", "model")}
        choice = chunk["choices"][0] if chunk["choices"] else {}
        for holder in (chunk, choice):
            if (ids := holder.get("prompt_token_ids")) is not None:
                self.prompt = list(ids)
        if choice:
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            self._take_tokens(list(choice.get("token_ids") or ()), str(text))
            self.finished = self.finished or choice.get("finish_reason") is not None
        if self._shows_ids:
            return event + b"\n\n"
        for holder in (chunk, choice):
            holder.update(dict.fromkeys(holder.keys() & {"prompt_token_ids", "token_ids"}))
        return _data(chunk)

    def _written(self, chunk: dict[str, Any]) -> bytes:
        """Convert an event of a later server to the format of the first server's events."""
        usage = chunk.get("usage")
        if not chunk["choices"]:
            return _data({**self._head, "choices": [], "usage": self._usage(usage)})
        choice = chunk["choices"][0]
        ids, text = self._take_tokens(list(choice.get("token_ids") or ()), str(choice.get("text") or ""))
        reason = choice.get("finish_reason")
        self.finished = self.finished or reason is not None
        if self.error or not (ids or text or reason):
            return b""
        shown = ids if self._shows_ids else None
        ends = {"finish_reason": reason, "stop_reason": choice.get("stop_reason"), "token_ids": shown}
        if self.path == CHAT:
            own = {"index": 0, "delta": {"content": text}, "logprobs": None, **ends}
        else:
            own = {"index": 0, "text": text, "logprobs": None, **ends, "prompt_token_ids": None}
        counted = {} if usage is None else {"usage": self._usage(usage)}
        return _data({**self._head, "choices": [own], **counted})

    def _take_tokens(self, ids: list[int], text: str) -> tuple[list[int], str]:
        known = self.tokens[self._at : self._at + len(ids)]
        again = min(len(text), len(self._ahead))
        if known != ids[: len(known)] or text[:again] != self._ahead[:again]:
            self._diverged = True
            self.error = "another server generated different tokens for the same prompt"
            return [], ""
        self._at += len(ids)
        self.tokens += ids[len(known) :]
        self._ahead = self._ahead[again:]
        self._since += text
        if len(ids) == 1 and text:
            # A single token with text is complete: vLLM delays the text of an incomplete character.
            self.clean_count, self._since = self._at, ""
        return ids[len(known) :], text[again:]

    def _usage(self, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        prompt, made = len(self.prompt or ()), len(self.tokens)
        counted = {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}
        return {**(usage or {}), **counted}

    def build_final_events(self) -> bytes:
        """Build the final events of a stream whose server exited after the last token but before it sent these events."""
        options = self.document.get("stream_options") or {}
        usage = b""
        if options.get("include_usage"):
            usage = _data({**self._head, "choices": [], "usage": self._usage(None)})
        return usage + b"data: [DONE]\n\n"


def _completion(data: bytes) -> dict[str, Any] | None:
    try:
        chunk = json.loads(data)
    except ValueError:
        return None
    known = isinstance(chunk, dict) and ("error" in chunk or isinstance(chunk.get("choices"), list))
    return chunk if known else None


def _data(document: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
