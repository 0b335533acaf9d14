"""Access the Hugging Face hub through huggingface_hub, and convert its errors.

huggingface_hub is imported on use, so starts of local models do not import it. It reads HF_HOME, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldstart.errors import AuthRequiredError, ColdstartError

_PAGE = "https://huggingface.co/{repo_id}"
# vLLM needs one form of the weights, and cannot load the formats of other frameworks.
_IGNORE = ["*.msgpack", "*.h5", "*.onnx", "*.tflite", "original/*", "consolidated*", "*.ot", "*.mlmodel"]


WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")


class ModelNotFoundError(Exception):
    """The hub has no such repository, revision or file."""


def config_dir(repo_id: str, revision: str | None, offline: bool) -> Path:
    """Return the local snapshot directory that contains config.json.

    Raises:
        ModelNotFoundError: The repository or the revision does not exist.
        AuthRequiredError: The repository is gated, or the file is not cached and the hub cannot be reached.
    """
    from huggingface_hub import hf_hub_download

    with _named_errors(repo_id):
        file = hf_hub_download(repo_id, "config.json", revision=revision, local_files_only=offline)
    return Path(file).parent


def snapshot(repo_id: str, revision: str | None, offline: bool, *, weights: bool = True) -> Path:
    """Download a repository (without its weights if not ``weights``) at ``revision``, and return its local directory.

    Raises:
        ModelNotFoundError: The repository or the revision does not exist.
        AuthRequiredError: The repository is gated, or the files are not cached and the hub cannot be reached.
    """
    from huggingface_hub import list_repo_files, snapshot_download

    ignore = [*_IGNORE, *(() if weights else WEIGHT_PATTERNS)]
    with _named_errors(repo_id):
        if weights and not offline and _has_safetensors(list_repo_files(repo_id, revision=revision)):
            ignore += ["*.bin", "*.pt", "*.pth"]
        path = Path(
            snapshot_download(repo_id, revision=revision, ignore_patterns=ignore, local_files_only=offline)
        )
    # Offline, the hub's client also returns a snapshot that contains only the configuration.
    if weights and offline and not any(any(path.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        raise _not_cached(repo_id)
    return path


def _has_safetensors(files: list[str]) -> bool:
    return any(file.endswith(".safetensors") for file in files)


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
        raise _not_cached(repo_id) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(str(error)) from error
    except (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError) as error:
        raise ModelNotFoundError(str(error).splitlines()[0]) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub has no public repository {repo_id}; if it is private, run hf auth login"
        ) from error
    except errors.HfHubHTTPError as error:
        raise ColdstartError(f"Cannot download {repo_id}: {str(error).splitlines()[0]}") from error


def _not_cached(repo_id: str) -> AuthRequiredError:
    return AuthRequiredError(
        f"Cannot find {repo_id}: it is not in the local hub cache, and the hub is not reachable (or --offline is set).",
        hint=f"run hf download {repo_id} on a machine with network, or pass a local directory",
    )
