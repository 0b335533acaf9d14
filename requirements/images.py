"""Write the digest of each image that a container file builds on: FROM IMAGE:TAG@sha256:DIGEST.

A tag can get other contents; a digest cannot. The registry is asked for the tag's digest, which is that of the index of all
platforms if the tag has one. A line whose registry does not answer is left as it is. `make lock` does the same.

Run: python requirements/images.py [FILE ...]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from coldstart.artifacts import oci, oci_registry
from coldstart.artifacts.errors import BundleError, RemoteFailedError

CONTAINERS = Path(__file__).parents[1] / "examples" / "container"
FROM = re.compile(r"^(FROM )([^\s@]+:[\w.-]+)(@sha256:[0-9a-f]{64})?(?=\s)", re.MULTILINE)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
DOCKER = "application/vnd.docker.distribution.manifest"
ACCEPT = f"{oci.INDEX_TYPE}, {DOCKER}.list.v2+json, {oci.MANIFEST_TYPE}, {DOCKER}.v2+json"


def find_digest(image: str) -> str:
    """Return the digest of HOST/NAME:TAG. Raises BundleError."""
    place = oci_registry.parse_repository(image)
    url = place.build_url("manifests", place.reference or "latest")
    with place.session.request("HEAD", url, headers={"Accept": ACCEPT}) as answer:
        digest = answer.headers.get("Docker-Content-Digest", "")
        if answer.status != 200 or not DIGEST.fullmatch(digest):
            raise RemoteFailedError(f"{place.host} answered {answer.status} without a digest of {image}")
    return digest


def pin_images(files: Sequence[Path]) -> list[str]:
    """Write the digests into the container files, and return why a line was left as it is."""
    problems: list[str] = []

    def pin(line: re.Match[str]) -> str:
        try:
            return f"{line[1]}{line[2]}@{find_digest(line[2])}"
        except BundleError as error:
            problems.append(f"cannot pin {line[2]}, its line is unchanged: {error}")
            return line[0]

    for file in files:
        text = file.read_text(encoding="utf-8")
        file.write_text(FROM.sub(pin, text), encoding="utf-8")
    return problems


def main(names: Sequence[str] = ()) -> int:
    """Pin the images of these files, or of all in examples/container; return 1 if a line is unchanged."""
    problems = pin_images([Path(name) for name in names] or sorted(CONTAINERS.glob("Containerfile*")))
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
