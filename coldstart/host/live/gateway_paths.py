"""Paths that a gateway forwards to the servers of its models, and those that it answers itself."""

from __future__ import annotations

from collections.abc import Iterable

from coldstart.host.live.answers import Scope

PASSED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/rerank",
    "/pooling",
    "/classify",
    "/tokenize",
    "/detokenize",
)
READS = ("/load", "/ping", "/tokenizer_info", "/version")
"""Routes of vLLM without a model's name, which a host reads from its only or its default model."""
HEALTH = "/health"
MODELS = "/v1/models"
OPEN = ("/", HEALTH, "/ui", "/ui/")
"""Paths that need no key: they reveal nothing about the models."""
UPSTREAM = "/upstream/"


def split_target(path: str, known: Iterable[str]) -> tuple[str, str] | None:
    """Return the model and the server's path in UPSTREAM + MODEL + PATH; None unless the path is one of `known`.

    A model's name may contain slashes, so the longest known path at the end is taken.
    """
    named = path.removeprefix(UPSTREAM)
    found = max((one for one in known if named.endswith(one)), key=len, default=None)
    return None if found is None or found == named else (named.removesuffix(found), found)


def find_target(scope: Scope) -> tuple[str, str] | None:
    """Return model and path of a POST to UPSTREAM; None for any other request."""
    if scope["method"] != "POST" or not scope["path"].startswith(UPSTREAM):
        return None
    return split_target(scope["path"], PASSED)
