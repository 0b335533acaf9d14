"""Fetch and run tests of vLLM's HTTP API against a server that runs already.

pip downloads vLLM's source distribution and compares its digest. Only the chosen test files are unpacked; in them, MODEL_NAME
is the directory of the model that is served, and no adapter is downloaded. None of their code is part of this project.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.start.running_server import URL_VARIABLE

VERSION = "0.32.0"
SOURCE = f"vllm=={VERSION} --hash=sha256:d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad\n"
# The first runs the tests; with the others, pip reads the metadata of vLLM's source.
TOOLS = """\
pytest-asyncio==1.5.0 --hash=sha256:557f255ee03cc84f84a8d5f438bc9c6e0f714bf86970ae743c7ecb5a38d7e07d
setuptools-rust==1.13.0 --hash=sha256:666439c4d90e968bb625bcf87ec0aa02b4f49e599d2f5dc255c633a04e8eca99
semantic-version==2.10.0 --hash=sha256:de78a3b8e0feda74cabc54aab2da702113e33ac9d9eb9d2389bcf1f58b7d9177
setuptools-scm==10.3.4 --hash=sha256:82f34c3e3084fc2b57d397200637cc13f2338004052d2fee47baa5f0e902464e
vcs-versioning==2.6.0 --hash=sha256:f8bebd1302ebc12e67ceb30fc7dd698ec969414b6fa43b30c3f14ac9b1e72c41
"""
ENTRYPOINTS = "tests/entrypoints"
FILES = (
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/completion/test_completion.py",
    "openai/test_return_token_ids.py",
    "serve/instrumentator/test_basic.py",
    "serve/tokenize/test_tokenization.py",
)
# They need a server with other arguments: an adapter, a context of 10,000 tokens, and load tracking.
DESELECTED = ("zephyr", "test_request_cancellation", "test_server_load")
PYTEST = (
    "--confcutdir=.",
    "-c",
    os.devnull,
    "--rootdir=.",
    "-q",
    "--timeout=300",
)
MODEL_NAME = re.compile(r'^MODEL_NAME = ".*"$', re.M)
DOWNLOAD = re.compile(r"hf_api\(\)\.snapshot_download\(.*?\)")


def fetch(directory: Path) -> Path:
    """Download vLLM's source and the packages `TOOLS` into a directory. Return the archive of the source."""
    tools = directory / "packages"
    _pip("install", TOOLS, directory, "--only-binary", ":all:", "--target", str(tools))
    # These variables let vLLM's setup report the released version without a compiler.
    setup = {"PYTHONPATH": str(tools), "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VERSION}
    options = ("--no-binary", ":all:", "--no-build-isolation", "--dest", str(directory))
    _pip("download", SOURCE, directory, *options, variables=setup)
    return directory / f"vllm-{VERSION}.tar.gz"


def unpack(archive: Path, directory: Path, model: str) -> None:
    """Unpack the chosen tests below `directory`, with the packages that contain them, for a served model name."""
    wanted = {f"{ENTRYPOINTS}/{file}" for file in FILES} | {f"{ENTRYPOINTS}/conftest.py"}
    with tarfile.open(archive) as source:
        for member in source:
            path = member.name.partition("/")[2]
            if path in wanted or (path.startswith("tests/") and path.endswith("/__init__.py")):
                data = source.extractfile(member)
                assert data is not None
                text = MODEL_NAME.sub(lambda _: f"MODEL_NAME = {model!r}", data.read().decode())
                text = DOWNLOAD.sub('""', text)
                (directory / path).parent.mkdir(parents=True, exist_ok=True)
                (directory / path).write_text(text, encoding="utf-8")
    shim = Path(__file__).with_name("running_server.py").read_text(encoding="utf-8")
    (directory / "tests/utils.py").write_text(shim, encoding="utf-8")


def run(directory: Path, url: str, model: str) -> dict[str, str]:
    """Run the unpacked tests against a server of `model`. Return the outcome of each: "passed", "skipped" or the error."""
    report = directory / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        *PYTEST,
        f"--junitxml={report}",
        "-k",
        f"not {' and not '.join(DESELECTED)}",
    ]
    variables = {
        "PYTHONPATH": os.pathsep.join([str(directory), str(directory / "packages")]),
        URL_VARIABLE: url,
    }
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    files = [f"{ENTRYPOINTS}/{file}" for file in FILES]
    with (directory / "pytest.log").open("wb") as log:
        subprocess.run(
            [*command, *files], cwd=directory, env=os.environ | variables | offline, stdout=log,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    if not report.exists():
        raise RuntimeError(f"vLLM's tests did not run: {(directory / 'pytest.log').read_text()[-3000:]}")
    cases = ElementTree.parse(report).iter("testcase")
    return {_name(case).replace(model, "MODEL"): _outcome(case).replace(model, "MODEL") for case in cases}


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}".removeprefix("tests.entrypoints.")


def _outcome(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag == "skipped":
            return "skipped"
        if child.tag in ("failure", "error"):
            return (child.get("message") or child.tag).splitlines()[0][:200]
    return "passed"


def _pip(
    action: str, packages: str, directory: Path, *options: str, variables: dict[str, str] | None = None
) -> None:
    requirements = directory / "requirements.txt"
    requirements.write_text(packages, encoding="utf-8")
    command = [sys.executable, "-m", "pip", action, "--no-deps", "--require-hashes", "--quiet", *options]
    subprocess.run(
        [*command, "--requirement", str(requirements)], env=os.environ | (variables or {}), check=True
    )
