"""Access the Hugging Face hub through huggingface_hub, and convert its errors.

A request to the hub is not repeated. If the hub does not answer, a complete copy in the local cache is used; an incomplete copy
is an error that names the missing files. huggingface_hub is imported on first use, so a local model does not need it. It
reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE itself.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from coldstart.errors import AuthRequiredError, ColdstartError

_PAGE = "https://huggingface.co/{repo_id}"
# vLLM needs one form of the weights, and cannot load the formats of other frameworks.
_IGNORE = ["*.msgpack", "*.h5", "*.onnx", "*.tflite", "original/*", "consolidated*", "*.ot", "*.mlmodel"]
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 5.0

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")


class ModelNotFoundError(Exception):
    """The hub has no such repository, revision or file."""


class HubUnreachableError(ColdstartError):
    """The hub does not answer, and the local cache has no complete copy (exit code 2)."""


def config_dir(repo_id: str, revision: str | None, offline: bool) -> Path:
    """Return the local snapshot directory that holds config.json.

    Raises:
        ModelNotFoundError: the hub has no such repository or revision.
        AuthRequiredError: the repository is gated, or not cached and the network is off.
        HubUnreachableError: the repository is not cached, and the hub does not answer.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    offline = offline or _is_offline()
    cached = isinstance(try_to_load_from_cache(repo_id, "config.json", revision=revision), str)
    pinned = revision is not None and _COMMIT.fullmatch(revision)
    # huggingface_hub tries for half a minute to reach the hub for a file that is not cached.
    if not offline and not cached and _list_files(repo_id, revision) is None:
        raise _unreachable(repo_id, "the local cache holds no copy")
    download = partial(hf_hub_download, repo_id, "config.json", revision=revision, etag_timeout=_TIMEOUT_S)
    with _named_errors(repo_id):
        try:
            file = download(local_files_only=offline or bool(cached and pinned))
        except Exception as error:
            # huggingface_hub uses the cache if no connection is made, not if it breaks.
            if not cached or not _is_unreachable(error):
                raise
            file = download(local_files_only=True)
    return Path(file).parent


def snapshot(repo_id: str, revision: str | None, offline: bool, *, weights: bool = True) -> Path:
    """Return the local directory of the repository (or all but its `weights`) at `revision`, downloading what is missing.

    Raises:
        ModelNotFoundError: the hub has no such repository or revision.
        AuthRequiredError: the repository is gated, or its copy is incomplete and the network is off.
        HubUnreachableError: the copy in the local cache is incomplete, and the hub does not answer.
    """
    from huggingface_hub import snapshot_download

    offline = offline or _is_offline()
    files = None if offline else _list_files(repo_id, revision)
    ignore = [*_IGNORE, *(() if weights else WEIGHT_PATTERNS)]
    if files is not None and weights and any(file.endswith(".safetensors") for file in files):
        ignore += ["*.bin", "*.pt", "*.pth"]
    if files is None:
        return _cached(repo_id, revision, offline, weights)
    with _named_errors(repo_id):
        return Path(snapshot_download(repo_id, revision=revision, ignore_patterns=ignore))


def list_missing(directory: Path, *, weights: bool = True) -> list[str]:
    """Return the names of files that a snapshot directory lacks, as far as its own links and indexes show."""
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
        index = next(directory.glob(f"{pattern}.index.json"), None)
        if index is not None:
            named = _read_index(index)
            if missing := [name for name in named if not (directory / name).exists()]:
                return missing
        if index is not None or any(directory.glob(pattern)):
            return []
    return [f"weights ({', '.join(WEIGHT_PATTERNS)})"]


def _read_index(index: Path) -> set[str]:
    try:
        return {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {index.name}


def _cached(repo_id: str, revision: str | None, offline: bool, weights: bool) -> Path:
    path = config_dir(repo_id, revision, offline=True)
    missing = list_missing(path, weights=weights)
    if not missing:
        return path
    reason = f"its copy in the local hub cache lacks {', '.join(missing)}"
    raise _not_cached(repo_id, reason) if offline else _unreachable(repo_id, reason)


def _list_files(repo_id: str, revision: str | None) -> list[str] | None:
    """Return the names of the repository's files, or None if the hub does not answer."""
    from huggingface_hub import model_info

    with _named_errors(repo_id):
        try:
            found = model_info(repo_id, revision=revision, timeout=_TIMEOUT_S)
        except Exception as error:
            if not _is_unreachable(error):
                raise
            return None
    return [file.rfilename for file in found.siblings or ()]


def _is_unreachable(error: Exception) -> bool:
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    # The name of the package of huggingface_hub's HTTP client depends on its release.
    return any(
        kind.__name__ == "TransportError" and kind.__module__.startswith("httpx")
        for kind in type(error).__mro__
    )


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextmanager
def _named_errors(repo_id: str) -> Iterator[None]:
    from huggingface_hub import errors

    page = _PAGE.format(repo_id=repo_id)
    try:
        yield
    except errors.GatedRepoError as error:
        raise AuthRequiredError(
            f"Cannot download {repo_id}: it is gated, and the hub did not accept your login.",
            hint=f"request access at {page}, then run hf auth login",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise _not_cached(repo_id, "it is not in the local hub cache") from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(str(error)) from error
    except (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError) as error:
        raise ModelNotFoundError(str(error).splitlines()[0]) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub has no public repository {repo_id}; if it is private, run hf auth login"
        ) from error
    except errors.HfHubHTTPError as error:
        raise ColdstartError(f"The hub failed for {repo_id}: {str(error).splitlines()[0]}") from error
    except Exception as error:
        if not _is_unreachable(error):
            raise
        raise _unreachable(repo_id, f"the download stopped: {type(error).__name__}") from error


def _not_cached(repo_id: str, reason: str) -> AuthRequiredError:
    return AuthRequiredError(
        f"cannot use {repo_id} offline: {reason}.",
        hint=f"on a machine with network: hf download {repo_id}; or name a local directory",
    )


def _unreachable(repo_id: str, reason: str) -> HubUnreachableError:
    return HubUnreachableError(
        f"cannot fetch {repo_id}: the hub does not answer, and {reason}.",
        hint=f"check the network, HF_ENDPOINT and the proxy; or on another machine: hf download {repo_id}",
    )
