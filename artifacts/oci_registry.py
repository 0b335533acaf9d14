"""Push and pull over the OCI distribution API 1.1. Blobs stream both ways; signatures travel as referrers.

A registry without the referrers API gets the fallback of the specification: an index tagged sha256-<hex>.
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
from coldstart.artifacts.net.http_client import Answer, redirected
from coldstart.artifacts.oci_layout import MAX_SIGNATURES, list_signatures, payloads
from coldstart.artifacts.registry_auth import RegistrySession

_REFERENCE = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(:\d{1,5})?|\[[0-9a-f:]+\](:\d{1,5})?)/"
    r"(?P<name>[a-z0-9]+([._/-]+[a-z0-9]+)*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127})|@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_SAID = 200  # Maximum number of bytes of an error text to show.
_ACCEPT = {"Accept": f"{oci.MANIFEST_TYPE}, {oci.INDEX_TYPE}"}


@dataclass(frozen=True, slots=True)
class Repository:
    """Repository of a registry; `reference` is a tag or digest."""

    host: str
    name: str
    reference: str | None
    session: RegistrySession

    def url(self, kind: str, what: str) -> str:
        """Return an address below this repository."""
        return f"{self.session.base}/v2/{self.name}/{kind}/{what}"

    def open(self, blob: oci.Descriptor) -> BinaryIO:
        """Stream a manifest or blob. Raises MissingBlobError, RemoteDeniedError or RemoteFailedError."""
        kind = "manifests" if blob.media_type in (oci.MANIFEST_TYPE, oci.INDEX_TYPE) else "blobs"
        headers = _ACCEPT if kind == "manifests" else {}
        answer = self.session.ask("GET", self.url(kind, blob.digest), headers=headers)
        if answer.status == 404:
            raise MissingBlobError(f"{blob.digest} is not in {self.host}/{self.name}")
        _expect(answer, 200)
        return cast("BinaryIO", answer)

    def resolve(self) -> oci.Descriptor:
        """Return the manifest of the tag or digest.

        Raises MissingBlobError, RemoteDeniedError, RemoteFailedError, TooLargeError.
        """
        reference = self.reference or "latest"
        answer = self.session.ask("GET", self.url("manifests", reference), headers=_ACCEPT)
        if answer.status == 404:
            raise MissingBlobError(
                f"{self.host}/{self.name}:{reference} does not exist", hint="check the tag"
            )
        _expect(answer, 200)
        data = answer.read_up_to(LIMITS.manifest + 1)
        oci.parse_manifest(data)
        descriptor = oci.describe(data, oci.MANIFEST_TYPE)
        if reference.startswith("sha256:") and descriptor.digest != reference:
            raise RemoteFailedError(
                f"{self.host} returned a manifest with digest {descriptor.digest} for {reference}"
            )
        return descriptor

    def signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
        """Return the payloads of the signatures that refer to `subject`."""
        listed = self._index(self.url("referrers", subject.digest))
        if listed is None:
            listed = self._tagged(subject.digest)
        return payloads(self, listed, subject, MAX_SIGNATURES)

    def push(self, bundle: Bundle) -> oci.Descriptor:
        """Upload missing blobs, then the manifest under its tag, then signatures."""
        for blob in bundle.image.blobs:
            self._upload(bundle, blob)
        self._put(self.reference or "latest", bundle.image_bytes())
        entries = bundle.layout.entries()
        for entry, image in list_signatures(bundle.layout, entries, bundle.descriptor):
            for blob in image.blobs:
                self._upload(bundle, blob)
            self._attach(bundle.descriptor, entry, image)
        return bundle.descriptor

    def _upload(self, bundle: Bundle, blob: oci.Descriptor) -> None:
        with self.session.ask("HEAD", self.url("blobs", blob.digest)) as known:
            if known.status == 200:
                return
        with self.session.ask("POST", self.url("blobs", "uploads/")) as answer:
            _expect(answer, 202)
            # A registry with TLS may not name an address without it; another host receives no login.
            place = redirected(answer.url, answer.headers.get("Location", ""))
        url = f"{place}{'&' if '?' in place else '?'}digest={blob.digest}"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}
        with blobs.open_verified(bundle.layout.root, blob.digest, blob.size) as file:
            _expect(self.session.ask("PUT", url, headers=headers, body=file), 201).close()

    def _put(self, reference: str, data: bytes, media_type: str = oci.MANIFEST_TYPE) -> str:
        """Upload a manifest and return the digest of the subject that the registry recognized, "" if none."""
        headers = {"Content-Type": media_type}
        with self.session.ask("PUT", self.url("manifests", reference), headers=headers, body=data) as answer:
            return _expect(answer, 201).headers.get("OCI-Subject", "")

    def _attach(self, subject: oci.Descriptor, entry: oci.Descriptor, image: oci.ImageManifest) -> None:
        if self._put(entry.digest, image.document()) == subject.digest:
            return
        listed = {item.digest: item for item in [*self._tagged(subject.digest), entry]}
        self._put(_fallback(subject.digest), oci.index_document(list(listed.values())), oci.INDEX_TYPE)

    def _tagged(self, digest: str) -> list[oci.Descriptor]:
        return self._index(self.url("manifests", _fallback(digest))) or []

    def _index(self, url: str) -> list[oci.Descriptor] | None:
        """Return the entries of an index, None if the registry answers with anything else."""
        with self.session.ask("GET", url, headers=_ACCEPT) as answer:
            if answer.status != 200 or oci.INDEX_TYPE not in answer.headers.get("Content-Type", ""):
                return None
            return oci.parse_index(answer.read_up_to(LIMITS.index + 1))


def repository(reference: str) -> Repository:
    """Parse HOST[:PORT]/NAME[:TAG|@DIGEST]. Raises InvalidReferenceError."""
    matched = _REFERENCE.fullmatch(reference)
    if not matched:
        hint = "write HOST[:PORT]/NAME[:TAG], such as registry.example/models/llama2-7b:v1"
        raise InvalidReferenceError(f"{reference!r} is not a registry reference", hint=hint)
    chosen = matched["tag"] or matched["digest"]
    host, name = matched["host"], matched["name"]
    return Repository(host, name, chosen, RegistrySession(host, name))


def _fallback(digest: str) -> str:
    return canonical.check_digest(digest).replace(":", "-")


def _expect(answer: Answer, status: int) -> Answer:
    if answer.status == status:
        return answer
    where = urlsplit(answer.url).path
    body = answer.read_up_to(_SAID).decode(errors="replace")
    raise RemoteFailedError(f"{where} answered {answer.status}: {body}")
