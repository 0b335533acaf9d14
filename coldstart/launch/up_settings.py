"""Digests of the settings of a server that `coldstart up` started, by which the next `up` finds out what it would change.

The key of a bundle leaves out what only the API server reads, such as an API key or a chat template. Here every option counts,
and every variable of the environment that a server's libraries read. The address does not: `up` compares it itself.

Secrets are among the settings, and a record must not help to guess them: the digests need a key.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coldstart.artifacts import files
from coldstart.artifacts.errors import ColdstartError
from coldstart.contract.arguments import group_words
from coldstart.contract.environment import VLLM_API_KEY
from coldstart.launch import template_environment
from coldstart.models import inspection, options, relevance
from coldstart.models.inspection import Lookup
from coldstart.system import paths

API_KEY = "API key"
"""Name of the key that clients need, from --api-key, or from VLLM_API_KEY without it."""
_UNTRUSTED = "--untrusted"
_ADDRESS = frozenset({"host", "port"})
# A word of these is a text, whatever it looks like: 1e3 and 1000 are two keys.
_TEXTS = frozenset({"api_key", "hf_token", "served_model_name"})
# A larger file counts by its name: it is no chat template, plugin or certificate.
_LARGEST = 1 << 20


def digest(lookup: Lookup, environment: Mapping[str, str]) -> dict[str, str]:
    """Return a digest of each setting by its name: an option with dashes, a variable, or `API_KEY`.

    Spellings that vLLM treats as equal have one digest. An explicit default of vLLM's server has none. A file counts with
    its content.

    Raises:
        UsageError: No private directory can be created for the key of the digests.
    """
    key, settings = _read_key(), _list_settings(lookup, environment)
    texts = {name: json.dumps(value, sort_keys=True) for name, value in settings.items()}
    return {
        name: hmac.new(key, f"{name}\0{text}".encode(errors="surrogateescape"), "sha256").hexdigest()
        for name, text in texts.items()
    }


def list_differences(running: Mapping[str, str], asked: Mapping[str, str]) -> list[str]:
    """Return the names of the settings in which a running server differs from what is asked. A permission need not be used."""
    names = {name for name in {*running, *asked} if running.get(name) != asked.get(name)}
    return sorted(names if _UNTRUSTED in running else names - {_UNTRUSTED})


def is_option(name: str) -> bool:
    """Return whether a setting can be typed on the command line. The others are variables."""
    return name == API_KEY or name.startswith("--")


def _list_settings(lookup: Lookup, environment: Mapping[str, str]) -> dict[str, object]:
    settings: dict[str, Any] = dict(template_environment.select_relevant(environment))
    normal = {_complete(name): value for name, value in lookup.vllm_args.normal.items()}
    defaults = {**relevance.DEFAULTS, **options.list_defaults()}
    for name, value in normal.items():
        if name not in _ADDRESS and not (name in defaults and defaults[name] == value):
            reloads = name.startswith("ssl_") and normal.get("enable_ssl_refresh") is True
            settings[_spell(name)] = value if reloads else _read_content(name, value)
    words = {_complete(name): texts for name, texts in group_words(lookup.vllm_args)}
    settings |= {_spell(name): words[name] for name in _TEXTS & {*words}}
    if settings.get(_spell("served_model_name")) == [lookup.model.name]:
        del settings[_spell("served_model_name")]
    given = settings.pop(_spell("api_key"), [VLLM_API_KEY.read(environment)])
    if keys := sorted(filter(None, given)):
        settings[API_KEY] = keys
    if lookup.accepts is not None and lookup.bundle is not None and not inspection.trust(lookup.bundle).ok:
        settings[_UNTRUSTED] = True
    return settings


def _complete(name: str) -> str:
    """Return the option that an abbreviation means, as in argparse."""
    option = name.replace("_", "-")
    known = options.list_options()
    meant = [one for one in known if one.startswith(option)]
    return meant[0].replace("-", "_") if option not in known and len(meant) == 1 else name


def _spell(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read_content(name: str, value: object) -> object:
    """Return the value with the content of each file in place of its name."""
    if isinstance(value, list):
        return [_read_content(name, item) for item in value]
    # The name of a parser or a model can also be that of a file by chance; a template is a file wherever one exists.
    if isinstance(value, str) and (name == "chat_template" or {".", "/"} & {*value}) and files.is_file(value):
        try:
            return {"content": files.read_regular(value, _LARGEST).decode("latin-1")}
        except (OSError, ColdstartError):
            return str(Path(value).absolute())
    return value


def _read_key() -> bytes:
    """Return the key of the digests, created on first use beside the records."""
    path = paths.runtime_dir() / "up.key"
    if not path.exists():
        files.create_once(path, os.urandom(32), 0o600)
    return files.read_regular(path)
