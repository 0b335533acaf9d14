"""The Hugging Face hub, through huggingface_hub alone, with its errors turned into ours.

huggingface_hub is imported on use: local models never pay for it. It reads HF_HOME, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldstart.errors import AuthRequiredError, ColdstartError

_PAGE = "https://huggingface.co/{repo_id}"
# One form of the weights is enough; formats of other frameworks never load in vLLM.
_IGNORE = ["*.msgpack", "*.h5", "*.onnx", "*.tflite", "original/*", "consolidated*", "*.ot", "*.mlmodel"]


WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")


class ModelNotFoundError(Exception):
    """The hub has no such repository, revision or file; the caller knows what the user meant."""


def config_dir(repo_id: str, revision: str | None, offline: bool) -> Path:
    """The local snapshot directory that holds config.json.

    Raises ModelNotFoundError, or AuthRequiredError when gated, or when offline and not cached.
    """
    from huggingface_hub import hf_hub_download

    with _named_errors(repo_id):
        file = hf_hub_download(repo_id, "config.json", revision=revision, local_files_only=offline)
    return Path(file).parent


def snapshot(repo_id: str, revision: str | None, offline: bool, *, weights: bool = True) -> Path:
    """The local directory of the whole repository (or all but its ``weights``) at ``revision``, downloading what is missing.

    Raises ModelNotFoundError, or AuthRequiredError when gated, or when offline and not cached.
    """
    from huggingface_hub import list_repo_files, snapshot_download

    ignore = [*_IGNORE, *(() if weights else WEIGHT_PATTERNS)]
    with _named_errors(repo_id):
        if weights and not offline and _has_safetensors(list_repo_files(repo_id, revision=revision)):
            ignore += ["*.bin", "*.pt", "*.pth"]
        path = Path(
            snapshot_download(repo_id, revision=revision, ignore_patterns=ignore, local_files_only=offline)
        )
    # Offline, the hub's client returns a snapshot of which only the configuration was ever fetched.
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
            f"{repo_id} is gated, and the hub does not accept your login for it.",
            hint=f"ask for access at {page}, then: hf auth login",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise _not_cached(repo_id) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(str(error)) from error
    except (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError) as error:
        raise ModelNotFoundError(str(error).splitlines()[0]) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub knows no public {repo_id}; if it is private: hf auth login"
        ) from error
    except errors.HfHubHTTPError as error:
        raise ColdstartError(f"The hub failed for {repo_id}: {str(error).splitlines()[0]}") from error


def _not_cached(repo_id: str) -> AuthRequiredError:
    return AuthRequiredError(
        f"{repo_id} is not in the local hub cache, and the hub is not reachable (or --offline is set).",
        hint=f"on a machine with network: hf download {repo_id}; or name a local directory",
    )
