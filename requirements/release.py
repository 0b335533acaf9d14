"""Describe and sign the files of a release. `make dist` runs this after the build.

    python requirements/release.py write dist                     SBOM, SHA256SUMS, and with RELEASE_KEY a signature
    python requirements/release.py verify dist PUBLIC_KEY         check signature and sums

The SBOM (CycloneDX) lists what the extras `cpu` and `all` install, with the pins of cpu.lock. RELEASE_KEY is the path of an
ed25519 private key in PEM. SHA256SUMS.sigstore.json is the signature of SHA256SUMS in the form of a bundle's signature.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from coldstart.artifacts import canonical, sign
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.sign import read_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from lock import HERE, TORCH, compile_pins

ROOT = HERE.parent
TOOLS = ROOT / "build/tools"
KEY = "RELEASE_KEY"
EXTRAS = ("cpu", "all")
SUMS, SIGNATURE, SBOM = "SHA256SUMS", "SHA256SUMS.sigstore.json", "sbom.cdx.json"


def write_sbom(target: Path) -> None:
    """Write the SBOM. uv selects the pins of the extras; cyclonedx-bom writes and validates the document.

    Raises:
        ValueError: cpu.lock lacks a pin, or cyclonedx-bom refuses the pins.
    """
    with tempfile.TemporaryDirectory() as scratch:
        pins = shutil.copy(HERE / "cpu.lock", scratch)  # uv retains pins of an existing output file
        compile_pins(pins, EXTRAS)
        if changed := _pins(Path(pins)) - _pins(HERE / "cpu.lock"):
            raise ValueError(f"cpu.lock lacks {', '.join(sorted(changed))}; run make lock")
        given = Path(pins).read_text(encoding="utf-8") + f"{TORCH}\n"
    options = (
        "requirements",
        "-",
        "--pyproject",
        "pyproject.toml",
        "--mc-type",
        "library",
        "--output-reproducible",
    )
    done = subprocess.run(
        [sys.executable, "-m", "cyclonedx_py", *options], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(TOOLS)},
        input=given, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(f"cyclonedx-bom failed: {done.stderr.strip()[-2000:]}")
    target.write_text(done.stdout, encoding="utf-8")


def write_sums(directory: Path) -> None:
    """Write the SHA-256 of each file of a directory, in the form that `sha256sum --check` reads."""
    names = sorted(path.name for path in directory.iterdir() if path.name not in (SUMS, SIGNATURE))
    lines = [f"{_hash(directory / name)}  {name}\n" for name in names]
    (directory / SUMS).write_text("".join(lines), encoding="utf-8")


def sign_sums(directory: Path, key: Path) -> None:
    """Sign the sums. Raises OSError or BundleError for a key that cannot be used."""
    digest = canonical.compute_digest((directory / SUMS).read_bytes())
    (directory / SIGNATURE).write_bytes(read_key(key).sign(digest))


def verify(directory: Path, public: Path) -> None:
    """Compare the signature of the sums and each sum. Raises ValueError, OSError or BundleError for a difference."""
    key = load_pem_public_key(public.read_bytes())
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"{public} is not an ed25519 key")
    sums = (directory / SUMS).read_bytes()
    if not sign.verify_signature(
        (directory / SIGNATURE).read_bytes(), canonical.compute_digest(sums), {"release": key}
    ).is_trusted:
        raise ValueError(f"{SIGNATURE} is not of the key {public}")
    lines = (line.split("  ", 1) for line in sums.decode().splitlines())
    listed = {name: digest for digest, name in lines}
    found = {path.name for path in directory.iterdir()} - {SUMS, SIGNATURE}
    if found != listed.keys():
        raise ValueError(f"{SUMS} and the directory differ in {', '.join(sorted(found ^ listed.keys()))}")
    for name, digest in listed.items():
        if _hash(directory / name) != digest:
            raise ValueError(f"{name} differs from {SUMS}")


def main() -> None:
    """Write or verify the files that describe a release."""
    parser = argparse.ArgumentParser(description="Describe, sign or verify the files of a release.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("write", "verify"):
        commands.add_parser(name).add_argument("directory", type=Path)
    commands.choices["verify"].add_argument("public_key", type=Path)
    given = parser.parse_args()
    try:
        if given.command == "verify":
            verify(given.directory, given.public_key)
            print(f"{given.directory} is what the key signed")
            return
        write_sbom(given.directory / SBOM)
        write_sums(given.directory)
        if key := os.environ.get(KEY):
            sign_sums(given.directory, Path(key).expanduser())
        else:
            print(f"not signed: {KEY} names no key", file=sys.stderr)
    except (OSError, ValueError, BundleError, subprocess.CalledProcessError) as error:
        hint = (
            "fetch the release again"
            if given.command == "verify"
            else f"correct the cause, then run make dist {KEY}=FILE"
        )
        sys.exit(f"error: cannot {given.command} the release in {given.directory}: {error}\nhint: {hint}")


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pins(lock: Path) -> set[str]:
    return {
        line.split()[0]
        for line in lock.read_text(encoding="utf-8").splitlines()
        if "==" in line.partition(" ")[0]
    }


if __name__ == "__main__":
    main()
