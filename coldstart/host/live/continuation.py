"""A stream that can go on at another server: what was asked, what the client has of it, what the next server is asked for.

vLLM is asked for token ids (`return_token_ids`), which are kept here and taken out again where the client did not ask. The next
server is asked to complete the prompt's ids and those that were generated, over /v1/completions, also for a chat, whose answer
is then written as the chat's. It computes again what it has not; what comes out is the same where it would have been the same
anyway: greedy, or sampled without a seed, whose next token hangs on those before it alone.

Invariant: the client gets each token's text once and in order. A server's text may be behind its tokens by a character that is
not whole yet: the next one is asked for what follows the last token whose text was all there, and what comes again is dropped.
It has to be the same, else the stream ends with an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from coldstart.contract.arguments import Arguments

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# What the rest can be asked for by the same words, whatever they say.
_SAMPLING = """model stream stream_options max_tokens temperature top_p top_k min_p repetition_penalty logit_bias stop_token_ids
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens include_stop_str_in_output allowed_token_ids
    user priority session_id cache_salt length_penalty return_token_ids"""
# What only makes a chat's prompt, whose ids are known then; and its own word for max_tokens.
_TEMPLATE = """messages add_special_tokens add_generation_prompt continue_final_message chat_template chat_template_kwargs
    documents max_completion_tokens"""
_SAME = frozenset(_SAMPLING.split())
_PROMPT = {COMPLETIONS: frozenset(("prompt", "add_special_tokens")), CHAT: frozenset(_TEMPLATE.split())}
# What does nothing when it says this.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "use_beam_search": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "stop": ([], ""),
    "bad_words": ([],),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "logprob_token_ids": ([],),
    "parallel_tool_calls": (True, False),
}
# Words of a server that make of a chat's text something else than text.
_PARSERS = ("reasoning_parser", "tool_call_parser", "enable_auto_tool_choice")
_DEFAULT_TOKENS = 16  # of a completion that does not say


def obstacle(path: str, document: Mapping[str, Any], words: Arguments) -> str:
    """What of a request, or of its server's words, keeps its stream where it began; empty where nothing does."""
    if path not in _PROMPT:
        return path
    if path == CHAT and any(words.gives(word) for word in _PARSERS):
        return "a parser of the server's"
    for name, value in document.items():
        if value is None or name in _SAME or name in _PROMPT[path]:
            continue
        if name == "seed" and document.get("temperature") == 0:
            continue
        # `0 == False`, and a list can be no key: compared one by one.
        if not any(
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in _NEUTRAL.get(name, ())
        ):
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
    """One stream. `tokens` are the ids generated so far, `clean` how many of them the client has all the text of."""

    def __init__(self, path: str, document: Mapping[str, Any]) -> None:
        self.path, self.document = path, document
        self.prompt: list[int] | None = None
        self.tokens: list[int] = []
        self.clean = 0
        self.finished = self.ended = False
        self.broken = ""
        self._greedy = document.get("temperature") == 0
        self._shows_ids = bool(document.get("return_token_ids"))
        self._head: dict[str, Any] = {}
        self._rest = b""
        self._later = self._diverged = self._foreign = False
        self._at = 0
        # Text that the client has and this server has still to say, and what it has chunk since `clean`.
        self._ahead = self._since = ""

    @classmethod
    def of(cls, path: str, document: Mapping[str, Any], words: Arguments) -> Self | None:
        """None for one that ends where it began."""
        return None if obstacle(path, document, words) else cls(path, document)

    @property
    def resumable(self) -> bool:
        """Whether another server can go on from here, or has to say nothing any more."""
        if self._diverged or self._foreign:
            return False
        # Tokens whose text is not there are sampled anew, and the client must not have seen anything of them.
        known = self._greedy or not (self._ahead or self._since or (self._shows_ids and self._behind))
        return not self._head or self.finished or (self.prompt is not None and known)

    @property
    def over(self) -> bool:
        """Whether a server that ends its answer here has chunk all: its last event, or nothing that is known here."""
        return self.ended or self._foreign

    @property
    def _behind(self) -> bool:
        return len(self.tokens) > self.clean

    def request(self, path: str) -> tuple[str, bytes]:
        """Where and for what a server is asked: at first for all of it, then for the rest."""
        self._rest, self.broken = b"", ""
        if self.prompt is None:
            return path, self._body({**self.document, "return_token_ids": True})
        self._later, self._at = True, self.clean
        self._ahead, self._since = self._since + self._ahead, ""
        if not self._greedy:
            del self.tokens[self.clean :]
        return COMPLETIONS, self._body(self._remaining())

    def warming(self) -> bytes:
        """A completion of one token, after which a server has computed what there is so far."""
        asked = {"model": self.document["model"], "prompt": self._so_far(), "max_tokens": 1, "temperature": 0}
        return self._body(
            asked | {name: self.document[name] for name in ("cache_salt",) if name in self.document}
        )

    def _so_far(self) -> list[int]:
        return [*(self.prompt or ()), *self.tokens[: self.clean]]

    def _remaining(self) -> dict[str, Any]:
        given = self.document
        limit = given.get("max_completion_tokens") or given.get("max_tokens")
        if limit is None and self.path == COMPLETIONS and "max_tokens" not in given:
            limit = _DEFAULT_TOKENS
        asked = {name: value for name, value in given.items() if name in _SAME}
        asked |= {"prompt": self._so_far(), "stream": True, "return_token_ids": True}
        asked["max_tokens"] = None if limit is None else limit - self.clean
        if given.get("min_tokens"):
            asked["min_tokens"] = max(0, given["min_tokens"] - self.clean)
        return asked

    @staticmethod
    def _body(document: Mapping[str, Any]) -> bytes:
        return json.dumps(document).encode()

    # What comes.

    def take(self, piece: bytes) -> bytes:
        """What of it the client gets: whole events. `broken` says that the server can say no more of this stream."""
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        passed = []
        for event in events:
            if self.broken:
                break
            passed.append(self._event(event))
        return b"".join(passed)

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: "):
            return event + b"\n\n"
        if event == b"data: [DONE]":
            self.ended = self.finished or self._foreign
            self.broken = "" if self.ended else "the stream ended before its last token"
            return event + b"\n\n" if self.ended else b""
        chunk = _completion(event[6:])
        if chunk is None:
            self._foreign = True
            return event + b"\n\n"
        if "error" in chunk:
            self.broken = str(chunk["error"])[:200]
            return b""
        return self._written(chunk) if self._later else self._seen(chunk, event)

    def _seen(self, chunk: dict[str, Any], event: bytes) -> bytes:
        """An event of the first server: as it would have been without our question."""
        if not self._head:
            self._head = {name: chunk.get(name) for name in ("id", "object", "created", "model")}
        choice = chunk["choices"][0] if chunk["choices"] else {}
        for holder in (chunk, choice):
            if (ids := holder.get("prompt_token_ids")) is not None:
                self.prompt = list(ids)
        if choice:
            self._take_tokens(list(choice.get("token_ids") or ()), _text(choice))
            self.finished = self.finished or choice.get("finish_reason") is not None
        if self._shows_ids:
            return event + b"\n\n"
        for holder, name in (
            (chunk, "prompt_token_ids"),
            (choice, "prompt_token_ids"),
            (choice, "token_ids"),
        ):
            if name in holder:
                holder[name] = None
        return _data(chunk)

    def _written(self, chunk: dict[str, Any]) -> bytes:
        """An event of a later server, as the first would have written it."""
        usage = chunk.get("usage")
        if not chunk["choices"]:
            return _data({**self._head, "choices": [], "usage": self._usage(usage)})
        choice = chunk["choices"][0]
        ids, text = self._take_tokens(list(choice.get("token_ids") or ()), str(choice.get("text") or ""))
        reason = choice.get("finish_reason")
        self.finished = self.finished or reason is not None
        if self.broken or not (ids or text or reason):
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
        """What of these tokens and their text is new."""
        known = self.tokens[self._at : self._at + len(ids)]
        again = min(len(text), len(self._ahead))
        if known != ids[: len(known)] or text[:again] != self._ahead[:again]:
            self._diverged, self.broken = True, "another server made other tokens of the same ones"
            return [], ""
        self._at += len(ids)
        self.tokens += ids[len(known) :]
        self._ahead = self._ahead[again:]
        self._since += text
        if len(ids) == 1 and text:
            # A character that was not whole would have kept this one's text back.
            self.clean, self._since = self._at, ""
        return ids[len(known) :], text[again:]

    def _usage(self, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """Of the whole stream, whoever made it."""
        prompt, made = len(self.prompt or ()), len(self.tokens)
        counted = {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}
        return {**(usage or {}), **counted}

    def ending(self) -> bytes:
        """What is missing where the last token was there and the last event was not."""
        options = self.document.get("stream_options") or {}
        usage = b""
        if options.get("include_usage"):
            usage = _data({**self._head, "choices": [], "usage": self._usage(None)})
        return usage + b"data: [DONE]\n\n"


def _completion(data: bytes) -> dict[str, Any] | None:
    """An event of a completion, or an error; None for what is neither."""
    try:
        chunk = json.loads(data)
    except ValueError:
        return None
    known = isinstance(chunk, dict) and ("error" in chunk or isinstance(chunk.get("choices"), list))
    return chunk if known else None


def _text(choice: Mapping[str, Any]) -> str:
    return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")


def _data(document: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
