"""Answers of a phase: one JSON line each, written at once, so that a crash or a time limit loses no earlier one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any


def attempt(work: Callable[[], Any]) -> Any:
    """Return the result of `work` or the text of its exception."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - a probe reports whatever happens
        return f"{type(error).__name__}: {error}"


def tell(name: str, value: Any) -> None:
    """Write one answer."""
    print(json.dumps({"answer": name, "value": value}, default=str), flush=True)


def ask(name: str, work: Callable[[], Any]) -> None:
    """Write the answer of a probe, which may be the text of an exception."""
    tell(name, attempt(work))


def finish(result: dict[str, Any]) -> None:
    """Write the result of a phase."""
    print(json.dumps({"result": result}, default=str), flush=True)


def summarize(label: str, code: int | None, seconds: float, out: str, err: str) -> dict[str, Any]:
    """Return the step of the report: the result, or else the error; and all answers in both cases."""
    lines = [line for line in map(_parse, out.splitlines()) if isinstance(line, dict)]
    results = [line["result"] for line in lines if "result" in line]
    answers = {line["answer"]: line.get("value") for line in lines if "answer" in line}
    step: dict[str, Any] = {"label": label, "ok": not code and code is not None and bool(results)}
    step |= {"seconds": seconds} | ({"answers": answers} if answers else {})
    if step["ok"]:
        return step | {"result": results[-1]}
    return step | {"error": _describe(code, seconds), "stderr": err[-2500:]}


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # a library printed it
        return None


def _describe(code: int | None, seconds: float) -> str:
    if code is None:
        return f"no answer in {seconds:.0f} s"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else "it printed no result"
