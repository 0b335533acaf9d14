"""Bundle as a container image (OCI image specification 1.1) whose only file system layer is a store.

A pod mounts it as an image volume: container runtimes unpack layers of this type, but not those of a bundle. The layer is
the uncompressed archive that `export` writes, so its digest is also its diff id. Equal bundles give equal images.
"""

from __future__ import annotations

import hashlib
import io
import platform
import tempfile
from pathlib import Path

from coldstart.artifacts import canonical, oci
from coldstart.artifacts.archive import export_archive
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.oci_registry import Repository

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
DIGEST = "dev.coldstart.digest"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def push(bundle: Bundle, place: Repository, *, memory: bool = False) -> str:
    """Send the image and return the digest of its manifest. The archive is a temporary file meanwhile.

    Raises ProcessMemoryError, RemoteDeniedError, RemoteFailedError, DigestMismatchError, NoSpaceError.
    """
    with tempfile.TemporaryDirectory(prefix="coldstart-image-") as scratch:
        archive = Path(scratch) / "layer.tar"
        size = export_archive([bundle], archive, memory=memory)
        with archive.open("rb") as file:
            layer = oci.Descriptor(
                LAYER_TYPE, f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}", size
            )
        config = configuration(layer)
        about = oci.describe(config, CONFIG_TYPE)
        with archive.open("rb") as file:
            place.upload(layer, file)
    place.upload(about, io.BytesIO(config))
    manifest = document(about, layer, bundle)
    place.put(manifest)
    return canonical.digest(manifest)


def configuration(layer: oci.Descriptor) -> bytes:
    """Return the image's configuration, for the platform of this machine, as the bundle is."""
    machine = platform.machine()
    root = {"type": "layers", "diff_ids": [layer.digest]}
    return canonical.dumps(
        {"architecture": _ARCHITECTURES.get(machine, machine), "os": "linux", "config": {}, "rootfs": root}
    )


def document(config: oci.Descriptor, layer: oci.Descriptor, bundle: Bundle) -> bytes:
    """Return the image's manifest, whose annotations identify the bundle."""
    about = {oci.NAME: bundle.name, oci.VERSION: str(bundle.version), DIGEST: bundle.digest}
    return canonical.dumps(
        {
            "schemaVersion": 2,
            "mediaType": oci.MANIFEST_TYPE,
            "config": config.document(),
            "layers": [layer.document()],
            "annotations": about,
        }
    )
