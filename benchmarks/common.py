"""Store results and record the command that created them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import quantiles
from typing import Any

from coldstart.bench import facts
from coldstart.validate.launchers import find_coldstart_command

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"


def command_line() -> list[str]:
    """Return the command that runs the current benchmark again, without the paths in its arguments."""
    path = Path(sys.argv[0]).resolve()
    name = path.relative_to(HERE).with_suffix("") if path.is_relative_to(HERE) else path.stem
    return ["python", "-m", "benchmarks", str(name), *facts.strip_paths(sys.argv[1:])]


def commit() -> str:
    """Return the commit of this checkout, with "+" after it if files differ from it; "unknown" in a copy without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=8", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def about() -> dict[str, object]:
    """Return the date, the commit, the command and the machine of a result."""
    return {
        "date": facts.format_utc_now(),
        "commit": commit(),
        "command": command_line(),
        "machine": facts.describe_machine(),
    }


def parser(documentation: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows the docstring of the benchmark unchanged."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=documentation, formatter_class=form)


def run_coldstart(*words: str, **environment: str) -> str:
    """Run a command of coldstart; return what it prints. Raises CalledProcessError."""
    command, own = [*find_coldstart_command(), *words], os.environ | environment
    return subprocess.run(command, env=own, stdout=subprocess.PIPE, text=True, check=True).stdout


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return number, median, quartiles and range of the values."""
    values = [float(value) for value in values]
    low, middle, high = quantiles(values, n=4)
    return {"n": len(values), "p50": middle, "p25": low, "p75": high, "min": min(values), "max": max(values)}


def load(name: str) -> Any:
    """Return the result called `name`, or None if it was not measured."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def finish(name: str, result: Mapping[str, object]) -> None:
    """Store the result, after what `about` returns where it lacks that; print it without its lists as the last line."""
    result = {**about(), **result}
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"benchmark": name, **{k: v for k, v in result.items() if not isinstance(v, list)}}))
