"""Materialize a small model once, then compare every start mode with plain vLLM. `make demo` runs this."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

COLDSTART = str(Path(sys.executable).with_name("coldstart"))
ABOUT_MINUTES = 7
MEANING = """\
How to read the table:
  mode          start mode of the server; vllm-cold and vllm-warm are stock vLLM without and with its caches.
  first token   seconds from the launch of the process to the first token over HTTP; less is better.
  ratio         speedup over vllm-warm.
  cpu           CPU seconds of the start, which other load on this machine affects less than time.
All modes answered the same tokens, or the bench would have failed. The figures were measured on this machine's CPU.
Next: coldstart serve {model} -- {arguments}"""

started = time.monotonic()


def main() -> int:
    """Run the steps and return the exit code of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        default="tiny-llama",
        help="Alias, repository ID or directory of the model (default tiny-llama).",
    )
    parser.add_argument("--runs", default="1", help="Number of starts of each mode (default 1).")
    parser.add_argument(
        "--snapshot",
        action="store_true",
        help="Also create snapshots and measure starts from them (requires CRIU).",
    )
    parser.add_argument("vllm_args", nargs="*", help="vLLM arguments, after --.")
    options = parser.parse_args()
    vllm_args = ["--", *options.vllm_args]
    say(f"2 steps, about {ABOUT_MINUTES} minutes on two cores")
    say(
        f"step 1 of 2: materialize {options.model}: run vLLM once, save its compiled code, verify the result (about 2 minutes)"
    )
    if failed := materialize(options.model, options.snapshot, vllm_args):
        return failed
    say("step 2 of 2: bench: start the server in every mode, and plain vLLM for comparison (about 5 minutes)")
    failed = coldstart("bench", options.model, "--runs", options.runs, "--no-steady", *vllm_args)
    if not failed:
        say("done")
        print(MEANING.format(model=options.model, arguments=shlex.join(options.vllm_args)), file=sys.stderr)
    return failed


def materialize(model: str, snapshot: bool, vllm_args: list[str]) -> int:
    """Create the bundle, without a snapshot if that fails."""
    if snapshot and not coldstart("materialize", model, "--snapshot", *vllm_args):
        return 0
    if snapshot:
        say("the snapshot failed (see above); continuing without it")
    return coldstart("materialize", model, *vllm_args)


def coldstart(*arguments: str) -> int:
    """Run one command of coldstart and return its exit code."""
    print(f"$ {shlex.join(['coldstart', *arguments])}", file=sys.stderr, flush=True)
    return subprocess.run([COLDSTART, *arguments], check=False).returncode


def say(message: str) -> None:
    """Print a line with the time since the start, as in "demo [1:05] step 2 of 2"."""
    minutes, seconds = divmod(int(time.monotonic() - started), 60)
    print(f"demo [{minutes}:{seconds:02d}] {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
