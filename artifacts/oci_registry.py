"""Push and pull over the OCI distribution API 1.1. Blobs are streamed, and signatures are referrers of the manifest.

If a registry lacks the referrers API, an index with the tag sha256-<hex> lists them, as the specification defines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast
from urllib.parse import urlsplit

from coldstart.artifacts import blobs, canonical, oci
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import InvalidReferenceError, MissingBlobError, RemoteFailedError
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.net.http_client import HttpResponse, resolve_redirect
from coldstart.artifacts.oci_layout import MAX_SIGNATURES, list_signatures, read_signature_documents
from coldstart.artifacts.registry_auth import RegistrySession

_REFERENCE = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(:\d{1,5})?|\[[0-9a-f:]+\](:\d{1,5})?)/"
    r"(?P<name>[a-z0-9]+([._/-]+[a-z0-9]+)*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127})|@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_ERROR_TEXT_BYTES = 200  # Maximum number of bytes of an error response to show.
_ACCEPT = {"Accept": f"{oci.MANIFEST_TYPE}, {oci.INDEX_TYPE}"}


@dataclass(frozen=True, slots=True)
class Repository:
    """Repository in a registry. `reference` is a tag or a digest."""

    host: str
    name: str
    reference: str | None
    session: RegistrySession

    def build_url(self, resource: str, identifier: str) -> str:
        """Return the URL of a manifest, a blob or referrers in this repository."""
        return f"{self.session.base}/v2/{self.name}/{resource}/{identifier}"

    def open(self, blob: oci.Descriptor) -> BinaryIO:
        """Return a stream of a manifest or blob. Raises MissingBlobError, RemoteDeniedError or RemoteFailedError."""
        kind = "manifests" if blob.media_type in (oci.MANIFEST_TYPE, oci.INDEX_TYPE) else "blobs"
        headers = _ACCEPT if kind == "manifests" else {}
        answer = self.session.request("GET", self.build_url(kind, blob.digest), headers=headers)
        if answer.status == 404:
            raise MissingBlobError(f"{self.host}/{self.name} has no blob {blob.digest}")
        _require_status(answer, 200)
        return cast("BinaryIO", answer)

    def resolve_manifest(self) -> oci.Descriptor:
        """Fetch the manifest of the tag or digest and return its descriptor.

        Raises MissingBlobError, RemoteDeniedError, RemoteFailedError, TooLargeError.
        """
        reference = self.reference or "latest"
        answer = self.session.request("GET", self.build_url("manifests", reference), headers=_ACCEPT)
        if answer.status == 404:
            raise MissingBlobError(
                f"{self.host}/{self.name}:{reference} does not exist", hint="check the repository and the tag"
            )
        _require_status(answer, 200)
        data = answer.read_up_to(LIMITS.manifest_bytes + 1)
        oci.parse_manifest(data)
        descriptor = oci.describe_blob(data, oci.MANIFEST_TYPE)
        if reference.startswith("sha256:") and descriptor.digest != reference:
            raise RemoteFailedError(
                f"{self.host} returned a manifest with digest {descriptor.digest}, expected {reference}"
            )
        return descriptor

    def read_signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
        """Return the documents of the signatures that refer to `subject`."""
        listed = self._fetch_index(self.build_url("referrers", subject.digest))
        if listed is None:
            listed = self._fetch_fallback_index(subject.digest)
        return read_signature_documents(self, listed, subject, MAX_SIGNATURES)

    def push(self, bundle: Bundle) -> oci.Descriptor:
        """Upload missing blobs, then the manifest under its tag, then signatures. Return the descriptor of the manifest."""
        for blob in bundle.image_manifest.blobs:
            self._upload_blob(bundle, blob)
        self._upload_manifest(self.reference or "latest", bundle.read_image_manifest())
        entries = bundle.layout.read_entries()
        for entry, image in list_signatures(bundle.layout, entries, bundle.descriptor):
            for blob in image.blobs:
                self._upload_blob(bundle, blob)
            self._attach_signature(bundle.descriptor, entry, image)
        return bundle.descriptor

    def _upload_blob(self, bundle: Bundle, blob: oci.Descriptor) -> None:
        with self.session.request("HEAD", self.build_url("blobs", blob.digest)) as known:
            if known.status == 200:
                return
        with self.session.request("POST", self.build_url("blobs", "uploads/")) as answer:
            _require_status(answer, 202)
            # `resolve_redirect` rejects a redirect from https to http; credentials are sent to no other host.
            upload_url = resolve_redirect(answer.url, answer.headers.get("Location", ""))
        url = f"{upload_url}{'&' if '?' in upload_url else '?'}digest={blob.digest}"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}
        with blobs.open_verified(bundle.layout.root, blob.digest, blob.size) as file:
            _require_status(self.session.request("PUT", url, headers=headers, body=file), 201).close()

    def _upload_manifest(self, reference: str, data: bytes, media_type: str = oci.MANIFEST_TYPE) -> str:
        """Upload a manifest. Return the digest of the subject that the registry recognized, or "" if it recognized none."""
        headers = {"Content-Type": media_type}
        with self.session.request(
            "PUT", self.build_url("manifests", reference), headers=headers, body=data
        ) as answer:
            return _require_status(answer, 201).headers.get("OCI-Subject", "")

    def _attach_signature(
        self, subject: oci.Descriptor, entry: oci.Descriptor, image: oci.ImageManifest
    ) -> None:
        if self._upload_manifest(entry.digest, image.serialize()) == subject.digest:
            return
        listed = {item.digest: item for item in [*self._fetch_fallback_index(subject.digest), entry]}
        self._upload_manifest(
            _fallback_tag(subject.digest), oci.serialize_index(list(listed.values())), oci.INDEX_TYPE
        )

    def _fetch_fallback_index(self, digest: str) -> list[oci.Descriptor]:
        return self._fetch_index(self.build_url("manifests", _fallback_tag(digest))) or []

    def _fetch_index(self, url: str) -> list[oci.Descriptor] | None:
        """Return the entries of an index, or None if the registry does not return one."""
        with self.session.request("GET", url, headers=_ACCEPT) as answer:
            if answer.status != 200 or oci.INDEX_TYPE not in answer.headers.get("Content-Type", ""):
                return None
            return oci.parse_index(answer.read_up_to(LIMITS.index_bytes + 1))


def parse_repository(reference: str) -> Repository:
    """Parse a registry reference HOST[:PORT]/NAME[:TAG|@DIGEST]. Raises InvalidReferenceError."""
    matched = _REFERENCE.fullmatch(reference)
    if not matched:
        hint = "use HOST[:PORT]/NAME[:TAG], such as registry.example/models/llama2-7b:v1"
        raise InvalidReferenceError(f"invalid registry reference {reference!r}", hint=hint)
    chosen = matched["tag"] or matched["digest"]
    host, name = matched["host"], matched["name"]
    return Repository(host, name, chosen, RegistrySession(host, name))


def _fallback_tag(digest: str) -> str:
    return canonical.check_digest(digest).replace(":", "-")


def _require_status(answer: HttpResponse, status: int) -> HttpResponse:
    if answer.status == status:
        return answer
    where = urlsplit(answer.url).path
    body = answer.read_up_to(_ERROR_TEXT_BYTES).decode(errors="replace")
    raise RemoteFailedError(f"{where} returned HTTP status {answer.status}: {body}")
