"""Resolve the name that a user types to a model: an alias, a Hugging Face repository, or a local directory.

``resolve`` needs only config.json, so a key can be composed (and a missing bundle reported) before gigabytes are
downloaded. ``ensure_weights`` fetches the rest. A known commit hash pins both.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coldstart.artifacts.oci_layout import OciLayout
from coldstart.errors import UsageError
from coldstart.models import checkpoint_files, hub, tiny
from coldstart.models.aliases import ALIASES, NAMES
from coldstart.system import paths
from coldstart.system.dry_run import is_dry_run
from coldstart.system.paths import Cache

_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ResolvedModel:
    """Model name, location of the model's files, and parsed config.json.

    ``name`` is the alias if the model has one, else the repository ID, else the directory name. It is never a path, so a
    bundle can record it. ``path`` is the directory that contains config.json. ``repo_id`` and ``revision`` (a commit
    hash) are None for a directory that is not a hub snapshot.
    """

    name: str
    path: Path | None
    repo_id: str | None
    revision: str | None
    config: Mapping[str, Any]

    @property
    def weight_files(self) -> list[Path]:
        """Return the weight files in the model's directory, sorted by name, or an empty list without a directory."""
        return weight_files(self.path) if self.path is not None else []

    @property
    def cli_argument(self) -> str:
        """Return the command-line argument that selects this model."""
        known = self.name in NAMES or self.repo_id is not None
        return self.name if known or self.path is None else str(self.path)


def resolve(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache: Cache | None = None,
) -> ResolvedModel:
    """Resolve ``model`` and read its configuration, without downloading weights.

    Raises:
        UsageError: The model does not exist or its configuration is unreadable (exit code 2).
        AuthRequiredError: The hub denies access, or ``offline`` is set and the configuration is not cached (exit code 4).
    """
    if revision is not None and is_local_model(model):
        raise UsageError(
            f"cannot use --revision {revision}: the model {model} is local and has no revisions",
            hint="omit --revision",
        )
    if model in tiny.NAMES:
        return _local(model, tiny.build_tiny_model(model, (cache or Cache.at()).models))
    directory = paths.expand_user(model)
    if directory.is_dir():
        return _local(None, directory.resolve())
    repo_id = ALIASES.get(model.lower(), model)
    if not is_repo_id(repo_id):
        raise _unknown(model)
    try:
        directory = hub.fetch(repo_id, revision, offline, "configuration")
    except hub.ModelNotFoundError as error:
        raise _unknown(model, error) from error
    commit = directory.name if hub.COMMIT.fullmatch(directory.name) else None
    return ResolvedModel(_name(repo_id), directory, repo_id, commit, _read_config(directory))


def is_repo_id(word: str) -> bool:
    """Return whether ``word`` has the form of a hub repository ID, OWNER/NAME."""
    return bool(_REPO_ID.fullmatch(word)) and not word.startswith(("./", "../", "~", "/"))


def is_known_model(word: str) -> bool:
    """Return whether ``word`` is a model that coldstart knows without the hub: built-in, alias or directory."""
    return word.lower() in NAMES or is_local_model(word)


def is_local_model(word: str) -> bool:
    """Return whether ``word`` is a local model without revisions: a built-in tiny model or a directory."""
    return word in tiny.NAMES or paths.expand_user(word).is_dir()


def ensure_weights(model: ResolvedModel, *, offline: bool = False) -> ResolvedModel:
    """Download missing files (not in a dry run), and return ``model`` with the directory of its weights and tokenizer.

    Raises:
        AuthRequiredError: Under the same conditions as in ``resolve``.
        UsageError: The directory contains no weights, or weights that cannot be loaded.
    """
    if model.repo_id is not None:
        model = replace(model, path=hub.fetch(model.repo_id, model.revision, offline, "all"))
        if is_dry_run():
            return model  # files that a start downloads may be missing: see `list_missing_files`
    if not model.weight_files:
        partial = next(model.path.rglob("*.incomplete"), None) if model.path is not None else None
        raise UsageError(
            f"cannot load {model.name}: it has a configuration but no weights ({', '.join(hub.WEIGHT_PATTERNS)})"
            f"{f'; the download of {partial.name} is incomplete' if partial else ''}",
            hint="add weights to the directory, or use random weights: coldstart materialize "
            f"{model.cli_argument} -- --load-format dummy",
        )
    check_weights(model)
    return model


def ensure_tokenizer(model: ResolvedModel, *, offline: bool = False) -> ResolvedModel:
    """Download missing files except weights, and return ``model`` with their directory.

    Raises:
        AuthRequiredError: Under the same conditions as in ``resolve``.
    """
    if model.repo_id is not None:
        model = replace(model, path=hub.fetch(model.repo_id, model.revision, offline, "tokenizer"))
    return model


def list_missing_files(model: ResolvedModel, *, weights: bool = True) -> list[str]:
    """Return the names of files that a start of a hub model would download, according to the cached files."""
    if model.repo_id is None or model.path is None:
        return []
    return hub.list_missing_files(model.path, weights=weights)


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files of a model directory that vLLM would load, sorted by name.

    If there are safetensors files, only the safetensors files that the index lists are returned.

    Raises:
        UsageError: A file is not a regular file (reading a pipe would block), or the index is invalid.
    """
    for pattern in hub.WEIGHT_PATTERNS:
        if files := sorted(directory.glob(pattern)):
            for file in files:
                checkpoint_files.require_regular_file(file)
            return checkpoint_files.select_files(directory, files)
    return []


def check_weights(model: ResolvedModel) -> None:
    """Check that a local model's weight files are complete and match their index. A model without weights is accepted.

    Raises:
        UsageError: The weights cannot be loaded.
    """
    if model.path is not None:
        checkpoint_files.check_weight_files(model.path, model.weight_files)


def _local(name: str | None, directory: Path) -> ResolvedModel:
    # A snapshot directory of the hub's cache names its repository and commit. The path and the repository's name are the
    # same model, so both must give the same key.
    commit = directory.name if hub.COMMIT.fullmatch(directory.name) else None
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


def _read_config(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json"
    try:
        config = checkpoint_files.read_json_object(path)
    except FileNotFoundError as error:
        message = f"cannot read the model in {directory}: it contains no config.json"
        hint = "pass a directory that contains config.json"
        if OciLayout(directory).exists:
            message, hint = (
                f"{message}, but bundles",
                f"run `coldstart pull {shlex.quote(str(directory))}`, then specify the pulled bundle",
            )
        raise UsageError(message, hint=hint) from error
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{path}: architectures is not a list of names", hint=checkpoint_files.AGAIN)
    return config


def _unknown(model: str, cause: Exception | None = None) -> UsageError:
    near = difflib.get_close_matches(model.lower(), NAMES, n=3, cutoff=0.5)
    detail = f" ({cause})" if cause else ""
    meant = f"did you mean {', '.join(near)}? " if near else ""
    return UsageError(
        f"unknown model {model!r}: neither an alias, a local directory nor a repository on the hub{detail}",
        hint=f"{meant}use one of {', '.join(NAMES[:4])}, ..., OWNER/NAME, or a directory",
    )
