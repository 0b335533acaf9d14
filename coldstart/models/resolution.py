"""From the name a user types to a model: an alias, a Hugging Face repository, or a local directory.

``resolve`` needs config.json alone, so that a key can be composed (and a miss reported) before gigabytes
move; ``ensure_weights`` fetches the rest. A commit hash, once known, pins both.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coldstart.errors import UsageError
from coldstart.models import hub, tiny
from coldstart.models.aliases import ALIASES, NAMES
from coldstart.system import paths
from coldstart.system.paths import Cache

_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ResolvedModel:
    """One model: its name, where its files are, and its parsed config.json.

    ``name`` is an alias where there is one, else the repository, else the directory's last part: never a
    path, so that a bundle may carry it.
    ``path`` is the directory that holds config.json. ``repo_id`` and ``revision`` (a commit hash) are None
    for a directory that is no hub snapshot.
    """

    name: str
    path: Path | None
    repo_id: str | None
    revision: str | None
    config: Mapping[str, Any]

    @property
    def weight_files(self) -> list[Path]:
        """The weight files in its directory by name, none where there is no directory."""
        return weight_files(self.path) if self.path is not None else []

    @property
    def argument(self) -> str:
        """What to type to name this model again."""
        known = self.name in NAMES or self.repo_id is not None
        return self.name if known or self.path is None else str(self.path)


def resolve(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache: Cache | None = None,
) -> ResolvedModel:
    """Find ``model`` and read its configuration; weights are not fetched.

    Raises UsageError (2) when there is no such model or its configuration is unreadable, AuthRequiredError (4) when the
    hub refuses, or is not to be asked (``offline``) and the configuration is not cached.
    """
    if model in tiny.NAMES:
        _refuse_revision(model, revision)
        return _local(model, tiny.build(model, (cache or Cache.at()).models))
    directory = paths.expand(model)
    if directory.is_dir():
        _refuse_revision(model, revision)
        return _local(None, directory.resolve())
    repo_id = ALIASES.get(model.lower(), model)
    if not is_repo_id(repo_id):
        raise _unknown(model)
    return _from_hub(model, repo_id, revision, offline)


def is_repo_id(word: str) -> bool:
    """Whether ``word`` has the form of a repository's name, OWNER/NAME."""
    return bool(_REPO_ID.fullmatch(word)) and not word.startswith(("./", "../", "~", "/"))


def is_local(word: str) -> bool:
    """Whether ``word`` names a model of this machine, which has no revisions: one that is built here, or a directory."""
    return word in tiny.NAMES or paths.expand(word).is_dir()


def ensure_weights(model: ResolvedModel, *, offline: bool = False) -> ResolvedModel:
    """Return ``model`` with a ``path`` that holds its weights and tokenizer, downloading what is missing.

    Raises AuthRequiredError as ``resolve`` does, UsageError when a local directory holds no weights.
    """
    if model.repo_id is not None:
        model = replace(model, path=hub.snapshot(model.repo_id, model.revision, offline))
    if not model.weight_files:
        raise UsageError(
            f"{model.name} has a configuration but no weights ({', '.join(hub.WEIGHT_PATTERNS)}).",
            hint="bring them there, or do without them: coldstart materialize "
            f"{model.argument} -- --load-format dummy",
        )
    return model


def ensure_tokenizer(model: ResolvedModel, *, offline: bool = False) -> ResolvedModel:
    """Return ``model`` with a ``path`` that holds all but its weights, downloading what is missing.

    Raises AuthRequiredError as ``resolve`` does.
    """
    if model.repo_id is not None:
        model = replace(model, path=hub.snapshot(model.repo_id, model.revision, offline, weights=False))
    return model


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a model directory by name; safetensors alone where there are any, as in vLLM.

    Raises UsageError for one that is no regular file: whoever opened a pipe would wait for ever.
    """
    for pattern in hub.WEIGHT_PATTERNS:
        if files := sorted(directory.glob(pattern)):
            for file in files:
                _require_regular(file)
            return files
    return []


def _refuse_revision(model: str, revision: str | None) -> None:
    if revision is not None:
        raise UsageError(f"--revision {revision} has no meaning for {model}, which is on this machine.")


def _local(name: str | None, directory: Path) -> ResolvedModel:
    # A snapshot directory of the hub's cache names its own repository and commit; used by path it is the same
    # model as used by name, so it must come to the same key.
    commit = directory.name if _COMMIT.fullmatch(directory.name) else None
    snapshot = commit is not None and directory.parent.name == "snapshots"
    owner = directory.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    repo_id = owner if snapshot and _REPO_ID.fullmatch(owner) else None
    return ResolvedModel(
        name=name or _name(repo_id or directory.name),
        path=directory,
        repo_id=repo_id,
        revision=commit if snapshot else None,
        config=_read_config(directory),
    )


def _name(text: str) -> str:
    alias = next((alias for alias, repo_id in ALIASES.items() if repo_id == text), None)
    return alias or re.sub(r"[^A-Za-z0-9._/-]", "-", text).lstrip("._-") or "model"


def _from_hub(name: str, repo_id: str, revision: str | None, offline: bool) -> ResolvedModel:
    try:
        directory = hub.config_dir(repo_id, revision, offline)
    except hub.ModelNotFoundError as error:
        raise _unknown(name, error) from error
    commit = directory.name if _COMMIT.fullmatch(directory.name) else None
    return ResolvedModel(_name(repo_id), directory, repo_id, commit, _read_config(directory))


def _read_config(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json"
    _require_regular(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"{directory} holds no config.json, so it is no Hugging Face model directory."
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}.", hint="fetch the model again") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} is not a JSON object.", hint="fetch the model again")
    return config


def _require_regular(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no regular file.", hint="fetch the model again")


def _unknown(model: str, cause: Exception | None = None) -> UsageError:
    near = difflib.get_close_matches(model.lower(), NAMES, n=3, cutoff=0.5)
    detail = f" ({cause})" if cause else ""
    meant = f"did you mean {', '.join(near)}? " if near else ""
    return UsageError(
        f"No model {model!r}: neither an alias, nor a local directory, nor a repository of the hub{detail}.",
        hint=f"{meant}name one of {', '.join(NAMES[:4])}, ..., OWNER/NAME, or a directory",
    )
