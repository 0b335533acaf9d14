"""Wheels for tests of pip."""

import zipfile
from pathlib import Path


def write_wheel(directory: Path, name: str, version: str, files: dict[str, str], *requires: str) -> Path:
    """Write one pure wheel that pip installs, and return its file."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    directory.mkdir(exist_ok=True)
    file = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in {**files, f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "")
    return file
