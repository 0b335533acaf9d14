"""Access the Hugging Face Hub through huggingface_hub, and convert its errors.

A request to the hub is not repeated. If the hub returns no usable response (no response, an error, or a response that is
not from a hub), a complete copy in the local cache is used, with a warning that quotes the response. If the copy is
incomplete, an error names the missing files. The same applies to a commit, whose files cannot change, and to a branch,
for which the commit that was cached last is used. It also applies to a repository that was deleted, made private or
gated since: its files are on this machine, and the pods of a service must start without the hub.

huggingface_hub is imported on first use, so a local model does not need it. It reads HF_HOME, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE itself.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Literal

from coldstart.artifacts.files import open_replacement
from coldstart.errors import AuthRequiredError, ColdstartError, UsageError
from coldstart.models import checkpoint_files
from coldstart.system import secrets
from coldstart.system.dry_run import is_dry_run

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

# vLLM needs one form of the weights, and cannot load the formats of other frameworks.
_IGNORE = ["*.msgpack", "*.h5", "*.onnx", "*.tflite", "original/*", "consolidated*", "*.ot", "*.mlmodel"]
COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 5.0
# Limit for the whole response: _TIMEOUT_S limits each read, and nothing limits the address lookup.
_ANSWER_S = 10.0
_NO_COPY = "it is not in the local hub cache"
# Keys are names of errors of huggingface_hub, which is imported on first use.
_REASONS = {
    "GatedRepoError": "the repository is gated, and your login has no access",
    "RevisionNotFoundError": "the repository has no such revision",
    "RemoteEntryNotFoundError": "the repository has no such file",
    "RepositoryNotFoundError": "the repository does not exist or is private",
}

Part = Literal["configuration", "tokenizer", "all"]
"""Part of a repository: config.json, all files except the weights, or all files."""
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")


class ModelNotFoundError(Exception):
    """Error for a repository, revision or file that does not exist on the hub."""


class HubUnreachableError(ColdstartError):
    """Error if the hub returns no usable response, and the local cache has no complete copy (exit code 2)."""


class _HubFailure(Exception):
    """The hub gave no usable response. The argument is the error of huggingface_hub."""

    @property
    def cause(self) -> Exception:
        return self.args[0]  # type: ignore[no-any-return]


# The last description of each repository that the hub returned to this process.
_latest: dict[str, ModelInfo] = {}


def fetch(repo_id: str, revision: str | None, offline: bool, part: Part) -> Path:
    """Return the local directory of a part of the repository at `revision`, after downloading missing files.

    Raises:
        ModelNotFoundError: The hub has no such repository or revision, and it is not cached.
        AuthRequiredError: The copy in the local cache is incomplete, and the hub denies access or the network is off.
        HubUnreachableError: The copy in the local cache is incomplete, and the hub returns no usable response.
    """
    from huggingface_hub import constants, errors

    try:
        cached = _find_cached(repo_id, revision)
    except errors.HFValidationError as error:
        raise ModelNotFoundError(str(error)) from error
    # A configuration at a commit cannot have changed.
    is_known = part == "configuration" and cached is not None and COMMIT.fullmatch(revision or "")
    failure = None
    if not (offline or constants.HF_HUB_OFFLINE or is_dry_run() or is_known):
        try:
            directory = _download(repo_id, _ask(repo_id, revision), part)
        except _HubFailure as error:
            failure = error
        else:
            if directory != cached:
                _record(directory, revision)
            return directory
    missing = (
        [] if cached is None or part == "configuration" else list_missing_files(cached, weights=part == "all")
    )
    if cached is not None and (not missing or is_dry_run()):
        if failure is not None:
            copy = f"using the copy of {repo_id} in the local cache (commit {cached.name})"
            _warn(f"{_describe(failure.cause)}: {copy}")
        return cached
    lacks = f"its copy in the local hub cache lacks {', '.join(missing)}" if missing else _NO_COPY
    if failure is None:
        raise _not_cached(repo_id, lacks)
    cause, named = failure.cause, (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)
    is_absent = _status(cause) == 404 and not isinstance(cause, errors.GatedRepoError)
    if part == "configuration" and cached is None and (is_absent or isinstance(cause, named)):
        raise ModelNotFoundError(_describe(cause)) from cause
    raise _convert(repo_id, failure, lacks) from failure.cause


def _download(repo_id: str, info: ModelInfo, part: Part) -> Path:
    """Download the missing files of a part, and return the directory of the commit. Raises _HubFailure."""
    from huggingface_hub import hf_hub_download, snapshot_download

    directory = _find_cached(repo_id, info.sha)
    with _failures():
        if part == "configuration":
            if directory is not None:
                return directory
            # Request the commit: for a branch, huggingface_hub would hide an error and return the last copy.
            file = hf_hub_download(repo_id, "config.json", revision=info.sha, etag_timeout=_TIMEOUT_S)
            return Path(file).parent
        files = [file.rfilename for file in info.siblings or ()]
        ignore = [*_IGNORE, *(() if part == "all" else WEIGHT_PATTERNS)]
        if part == "all" and any(file.endswith(".safetensors") for file in files):
            ignore += ["*.bin", "*.pt", "*.pth"]
        wanted = [file for file in files if not any(fnmatch(file, pattern) for pattern in ignore)]
        if directory is None or not all((directory / name).exists() for name in wanted):
            directory = Path(snapshot_download(repo_id, revision=info.sha, ignore_patterns=ignore))
            # huggingface_hub returns only some of the files if it cannot request their names.
            if lacking := [name for name in wanted if not (directory / name).exists()]:
                raise ValueError(f"{lacking[0]} was not downloaded")
    return directory


def list_missing_files(directory: Path, *, weights: bool = True) -> list[str]:
    """Return the names of the files that a snapshot directory lacks, according to its own links and indexes."""
    missing = {
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if not path.exists() and (weights or not any(map(path.match, WEIGHT_PATTERNS)))
    }
    if weights:
        missing |= set(_list_missing_weights(directory))
    return sorted(missing)


def _list_missing_weights(directory: Path) -> list[str]:
    # The form of the weights that vLLM prefers decides; an index names the files of its form.
    for pattern in WEIGHT_PATTERNS:
        with suppress(UsageError):  # an invalid index is left to its reader
            if named := set(checkpoint_files.read_index(directory, pattern[1:]).values()):
                return [name for name in named if not (directory / name).exists()]
        if any(directory.glob(pattern)):
            return []
    return [f"weights ({', '.join(WEIGHT_PATTERNS)})"]


def _find_cached(repo_id: str, revision: str | None) -> Path | None:
    """Return the snapshot directory in the local cache, or None if it has no config.json."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(repo_id, "config.json", revision=revision)
    return Path(file).parent if isinstance(file, str) else None


def _record(directory: Path, revision: str | None) -> None:
    """Record the commit of a branch in the cache as huggingface_hub does, so that a start without the hub can find it."""
    reference = directory.parents[1] / "refs" / (revision or "main")
    with suppress(OSError):  # the cache cannot be written
        if directory.name != revision:
            reference.parent.mkdir(parents=True, exist_ok=True)
            with open_replacement(reference, durable=False) as file:
                file.write(directory.name.encode())


def _ask(repo_id: str, revision: str | None) -> ModelInfo:
    """Return the hub's description of the repository with its commit. Raises _HubFailure.

    A branch is looked up on each call. The commit that the hub returned last is not looked up again: it cannot change.
    """
    from huggingface_hub import model_info

    if (known := _latest.get(repo_id)) is not None and known.sha == revision:
        return known
    answer: Future[ModelInfo] = Future()

    def ask() -> None:
        try:
            found = model_info(repo_id, revision=revision, timeout=_TIMEOUT_S)
            if not COMMIT.fullmatch(str(found.sha)):
                raise ValueError("the response contains no commit hash")
            answer.set_result(found)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            answer.set_exception(error)

    Thread(target=ask, name="hub", daemon=True).start()
    with _failures():
        found = answer.result(_ANSWER_S)
    _latest[repo_id] = found
    return found


@contextmanager
def _failures() -> Iterator[None]:
    """Convert the errors of a request in the block to _HubFailure, except errors about local files and arguments."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError:
        raise
    except Exception as error:
        is_local = isinstance(error, OSError) and error.errno is not None
        if is_local and not isinstance(error, (errors.HfHubHTTPError, TimeoutError)):
            raise
        # huggingface_hub reports a failed request as a file that is not cached.
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
        raise _HubFailure(cause if isinstance(cause, Exception) else error) from error


@lru_cache(maxsize=64)
def _warn(message: str) -> None:
    # Warn only once: a start requests the configuration and the weights.
    logging.getLogger("coldstart").warning("%s", secrets.redact_text(message))


def _status(cause: Exception) -> int:
    from huggingface_hub.errors import HfHubHTTPError

    return cause.response.status_code if isinstance(cause, HfHubHTTPError) else 0


def _describe(cause: Exception) -> str:
    """Return a clause that describes what the hub did."""
    if status := _status(cause):
        phrase = f" {HTTPStatus(status).phrase}" if status in {*HTTPStatus} else ""
        reason = _REASONS.get(type(cause).__name__)
        return f"the hub returned HTTP status {status}{phrase}{f' ({reason})' if reason else ''}"
    # The name of the package of huggingface_hub's HTTP client depends on its release.
    kinds = {kind.__name__ for kind in type(cause).__mro__ if kind.__module__.startswith("httpx")}
    if "TransportError" in kinds or isinstance(cause, TimeoutError):
        return f"the hub does not respond ({_one_line(cause)})"
    return f"the response does not come from a hub ({_one_line(cause)})"


def _one_line(error: Exception) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _convert(repo_id: str, failure: _HubFailure, local: str) -> ColdstartError:
    """Return the error for a user whose cache has no complete copy. `local` describes the state of the cache."""
    from huggingface_hub import errors

    cause, page = failure.cause, f"https://huggingface.co/{repo_id}"
    if isinstance(cause, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return _not_cached(repo_id, _NO_COPY)
    message = f"cannot fetch {repo_id}: {_describe(cause)}, and {local}"
    status = _status(cause)
    if isinstance(cause, errors.GatedRepoError):
        return AuthRequiredError(message, hint=f"request access at {page}, then run `hf auth login`")
    if status in {401, 403}:
        return AuthRequiredError(
            message,
            hint=f"check the name; run `hf auth login`, or set HF_TOKEN to a token that may read {page}",
        )
    if status == 429:
        advice = "wait a few minutes, or log in (`hf auth login` or HF_TOKEN) to get a separate rate limit"
    else:
        advice = "check the network, HF_ENDPOINT and the proxy"
    return HubUnreachableError(
        message, hint=f"{advice}; or run `hf download {repo_id}` on another machine and copy its cache here"
    )


def _not_cached(repo_id: str, reason: str) -> AuthRequiredError:
    if is_dry_run():
        return AuthRequiredError(
            f"cannot plan a start of {repo_id}: {reason}, and a dry run downloads nothing",
            hint=f"run `hf download {repo_id} config.json`, or specify a local directory",
        )
    return AuthRequiredError(
        f"cannot use {repo_id} offline: {reason}",
        hint=f"run `hf download {repo_id}` on a machine with network access, or specify a local directory",
    )
