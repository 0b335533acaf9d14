"""A C++ compiler that compiles each of Inductor's kernels once in a run of the tests, and reads torch's headers once.

Most of a first start is g++, which takes 5 CPU seconds for each kernel, 4 of them for the same headers. The kernels of two
models, or of two machines of the tests, are mostly equal. The first is compiled by the real compiler with the real options;
the headers are a precompiled header, as Inductor has them where vLLM does not turn them off.

`install` makes the program; as a program, this module is g++ for one kernel.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"


def install(directory: Path) -> None:
    """Put the compiler into the directory, and the directory before those of PATH."""
    real = shutil.which("g++")
    if real is None:
        return
    directory.mkdir(exist_ok=True)
    program = directory / "g++"
    staged = program.with_name(f"g++.{os.getpid()}")
    staged.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" "{directory}" "{real}" "$@"\n')
    staged.chmod(0o755)
    staged.rename(program)
    os.environ["PATH"] = f"{directory}:{os.environ['PATH']}"


def _compile(cache: Path, real: str, arguments: list[str]) -> int:
    sources = [Path(word) for word in arguments if word.endswith(".cpp")]
    if "-shared" not in arguments or len(sources) != 1 or "-o" not in arguments:
        os.execv(real, [real, *arguments])
    (source,), output = sources, Path(arguments[arguments.index("-o") + 1])
    options = [word for word in arguments if word not in (str(source), str(output), "-o")]
    text = source.read_bytes()
    kept = cache / f"{_digest(repr(options).encode(), text)}.so"
    if not kept.exists():
        made = output.with_suffix(f".{os.getpid()}")
        header = ["-include", str(_precompile(real, options, cache))] if _HEADER.encode() in text else []
        if code := subprocess.call([real, *header, str(source), *options, "-o", str(made)]):
            return code
        staged = kept.with_suffix(f".{os.getpid()}")
        shutil.move(made, staged)
        staged.rename(kept)
    shutil.copy(kept, output)
    return 0


def _precompile(real: str, options: list[str], cache: Path) -> Path:
    """Return the header to include, precompiled for the options; concurrent compilers wait for the first."""
    options = [word for word in options if word != "-shared" and not word.startswith(("-l", "-L"))]
    header = cache / _digest(repr(options).encode()) / "prefix.h"
    header.parent.mkdir(exist_ok=True)
    with (header.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compiled = header.with_name("prefix.h.gch")
        if not compiled.exists():
            header.write_text(f"{_HEADER}\n")
            staged = header.with_name("staged.gch")
            subprocess.run(
                [real, "-x", "c++-header", *options, str(header), "-o", str(staged)],
                stderr=subprocess.DEVNULL,
                check=True,
            )
            staged.rename(compiled)
    return header


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:32]


if __name__ == "__main__":
    sys.exit(_compile(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
