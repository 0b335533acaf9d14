"""Errors under --format json are one JSON object in the last line of standard error; standard output remains empty."""

import json
from typing import Any

import pytest
from tools.shell import Run


def read_error(run: Run, *words: str, code: int = 2) -> dict[str, Any]:
    done = run(*words, code=code)
    assert done.stdout == ""
    error: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    assert error["exit_code"] == code and error["schema_version"] >= 2
    return error


@pytest.mark.parametrize(
    ("words", "code", "message", "hint"),
    [
        (("inspect", "no-such-bundle"), 2, "no-such-bundle", "use one of tiny-llama"),
        (
            ("serve", "tiny-llama", "--port", "99999"),
            2,
            "99999 is not in the range",
            "coldstart serve --help",
        ),
        (("serve",), 2, "Missing argument 'MODEL'", "coldstart serve --help"),
        (("list", "--no-such-option"), 2, "No such option: --no-such-option", "coldstart list --help"),
        (("fleet", "status", "--odd"), 2, "No such option: --odd", "coldstart fleet status --help"),
        (("--cache-dir", "/x", "list"), 2, "coldstart COMMAND --cache-dir", "coldstart --help"),
        (("--version=3", "list"), 2, "does not take a value", ""),
        (("lisst",), 2, "Did you mean 'list'?", "coldstart --help"),
        (
            ("template", "stop", "--level", "none"),
            2,
            "'none' is not one of",
            "coldstart template stop --help",
        ),
        (("import", "/nonexistent.tar"), 2, "/nonexistent.tar", ""),
    ],
)
def test_each_error_is_one_object(
    words: tuple[str, ...], code: int, message: str, hint: str, run: Run
) -> None:
    for form in (("--format", "json"), ("--format=json",)):
        error = read_error(run, *words, *form, code=code)
        assert message in error["error"] and hint in (error["hint"] or "")


def test_the_format_of_host_run_applies_to_host_with_a_model(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLDSTART_HOST_RUN_FORMAT", "json")
    assert "neither a command" in read_error(run, "host", "bogus")["error"]
    said = run("host", "status", "--url", "http://127.0.0.1:9", code=1).stderr
    assert said.startswith("error: no host responds")
