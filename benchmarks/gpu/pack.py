"""Pack vLLM's GPU build and its dependencies for a machine that has PyTorch and no package index: one archive, one table.

Of each library's device code only the given architecture is kept, and of FlashAttention only bf16: the rest is zeroed, which
compresses to nothing. The archive is unpacked into a directory that PYTHONPATH names. The script refuses above the limit.

Run: python -m benchmarks gpu/pack --python PYTHON --out DIR [--limit-mib 56]
Time: 4 minutes
Result: gpu/pack.json; the archive is not committed
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import finish, parser
from coldstart.graphs.elf import sections

VLLM = "vllm==0.32.0"
# Loaded where it is found; the plan measures it as an option, so it lies in a directory of its own.
OPTIONAL = ("instanttensor==0.2.2",)
NEEDED = (
    "annotated-types", "apache-tvm-ffi==0.1.11", "astor", "blake3", "cachetools", "cbor2", "cffi", "compressed-tensors==0.17.0",
    "cryptography", "depyf==0.20.0", "dill", "dnspython", "docstring-parser", "email-validator", "fastapi==0.136.1",
    "httptools", "httpcore2", "httpx2", "ijson", "interegular", "jiter", "jmespath", "jsonschema", "jsonschema-specifications",
    "lark==1.2.2", "llguidance==1.7.0", "lm-format-enforcer==0.11.3", "loguru", "mcp", "mcp-types",
    "model-hosting-container-standards", "msgspec", "openai", "opentelemetry-api", "opentelemetry-sdk",
    "opentelemetry-semantic-conventions", "opentelemetry-semantic-conventions-ai", "oss-harmony", "outlines-core==0.2.14",
    "partial-json-parser", "prometheus-fastapi-instrumentator", "pybase64", "pycparser", "pydantic", "pydantic-core",
    "python-json-logger", "python-multipart", "pyzmq", "referencing", "rpds-py", "setproctitle", "sniffio", "sse-starlette",
    "starlette", "supervisor", "truststore", "typing-inspection", "uvicorn", "watchfiles", "xgrammar==0.2.8", "zstandard",
)  # fmt: skip
# A dense model in bf16 needs the core operations and FlashAttention 3 of vLLM's libraries; the others are optional imports.
LIBRARIES = (
    "vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/cumem_allocator.abi3.so",
    "vllm/spinloop.abi3.so", "vllm/fs_io_C.abi3.so",
)  # fmt: skip
BF16_ONLY = "_vllm_fa3_C"
USELESS = ("*/tests/*", "*/include/*", "*/cutlass/*", "*/static/*.js", "*.hpp", "*.cuh", "*/vllm-rs", "*.lib")
_CONTAINER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQI8xI8xQQ")
_MAGIC, _CUBIN = 0xBA55ED50, 2
MIB = 1 << 20


def entries(library: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield (kind, architecture, offset, bytes) of each entry of a library's fat binaries; kind 2 is a cubin."""
    for section in sections(library):
        if section.name not in (".nv_fatbin", "__nv_relfatbin"):
            continue
        at = offset = section.offset
        size = len(section.data)
        while at + _CONTAINER.size <= offset + size:
            magic, _, header, length = _CONTAINER.unpack_from(library, at)
            if magic != _MAGIC:
                at += 8
                continue
            entry, end = at + header, at + header + length
            while entry + _ENTRY.size <= end:
                kind, _, head, body, _, architecture, _, _ = _ENTRY.unpack_from(library, entry)
                if not head:
                    break
                yield kind, architecture, entry + head, body
                entry += head + body
            at = end


def shrink(path: Path, architecture: int) -> None:
    """Zero the device code that a bf16 model on this architecture does not use."""
    library = path.read_bytes()
    shrunk = bytearray(library)
    for kind, target, offset, size in entries(library):
        code = library[offset : offset + size]
        names_other = b"bfloat16_t" not in code and (b"half_t" in code or b"e4m3" in code)
        other = BF16_ONLY in path.name and names_other
        if kind != _CUBIN or target != architecture or other:
            shrunk[offset : offset + size] = bytes(size)
    path.write_bytes(shrunk)


def download(python: str, names: tuple[str, ...], target: Path) -> None:
    """Fetch the wheels for this interpreter. Raises CalledProcessError."""
    pip = (python, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(target))
    subprocess.run([*pip, *names], check=True)


def unpack(wheels: Path, site: Path) -> None:
    """Unpack all wheels into one directory, without the files that no server reads."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                path = Path(member.filename)
                of_vllm = path.suffix == ".so" and path.parts[0] == "vllm"
                dropped = of_vllm and member.filename not in LIBRARIES
                if not dropped and not any(map(path.match, USELESS)):
                    archive.extract(member, site)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--python", default=sys.executable, help="interpreter of the other machine's version"
    )
    arguments.add_argument("--architecture", type=int, default=90)
    arguments.add_argument("--limit-mib", type=float, default=56.0)
    arguments.add_argument("--out", type=Path, default=Path("build/gpu-pack"))
    options = arguments.parse_args()
    out: Path = options.out.resolve()
    for folder, names in (("site", (VLLM, *NEEDED)), ("optional", OPTIONAL)):
        wheels, site = out / f"{folder}-wheels", out / folder
        shutil.rmtree(site, ignore_errors=True)
        wheels.mkdir(parents=True, exist_ok=True)
        download(options.python, names, wheels)
        unpack(wheels, site)
    for name in LIBRARIES:
        shrink(out / "site" / name, options.architecture)
    archive = out / "pack.tar.xz"
    pack = ["tar", "-C", str(out), "-I", "xz -7 -T0", "-cf", str(archive), "site", "optional"]
    subprocess.run(pack, check=True)
    sizes = {
        path.name: sum(one.stat().st_size for one in (path, *path.rglob("*")))
        for path in (out / "site").iterdir()
    }
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:15]
    total = archive.stat().st_size / MIB
    result = {"archive_mib": round(total, 1), "limit_mib": options.limit_mib}
    finish("gpu/pack", result | {"unpacked_mib": {name: round(sizes[name] / MIB, 1) for name in largest}})
    if total > options.limit_mib:
        sys.exit(1)


if __name__ == "__main__":
    main()
