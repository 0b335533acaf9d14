"""Exit codes are an API: 0 yes, 1 no, 2 error, 3 no bundle, 4 login or offline, 128 + signal."""

import json
from typing import Any

import pytest
from coldstart.artifacts import errors as bundle_errors
from coldstart.artifacts.store import BundleNotFoundError
from coldstart.commands import cli
from tools.command_line import Run, parse

from coldstart.errors import AuthRequiredError, CommandFailedError, NoBundleError, UsageError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandFailedError("x"), 1),
        (UsageError("x"), 2),
        (NoBundleError("x"), 3),
        (AuthRequiredError("x"), 4),
        (BundleNotFoundError("x"), 3),
        (bundle_errors.RemoteDeniedError("x"), 4),
        (bundle_errors.DigestMismatchError("x"), 1),
        (bundle_errors.InvalidReferenceError("x"), 2),
        (bundle_errors.NoSpaceError("x"), 2),
        (PermissionError(13, "Permission denied", "file"), 2),
        (RuntimeError("x"), 2),
    ],
)
def test_report_returns_the_exit_code_of_each_error(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._report_error(error) == code
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ")
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("module", "argv", "command", "extra"),
    [
        ("starlette", ["host", "x.toml"], "coldstart host", "host"),
        ("starlette", ["fleet", "up"], "coldstart fleet", "fleet"),
        ("pandas", ["trace-replay", "x"], "coldstart trace-replay", "lab"),
        ("ray", [], "this command", "fleet"),
    ],
)
def test_report_names_the_extra_when_a_module_is_not_installed(
    module: str, argv: list[str], command: str, extra: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._report_error(ModuleNotFoundError(f"No module named {module!r}", name=module), argv) == 2
    message = f"error: {command} requires {module}, which is not installed\n"
    assert capsys.readouterr().err == f"{message}hint: run `coldstart install {extra}`\n"


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("list", "--format", "yaml"), 2, "yaml"),
        (("list", "--", "--port", "1"), 2, "takes no arguments after --"),
        (("inspect", "lama2-7b"), 2, "llama2-7b"),
        (("inspect", "--key", "--tree", "x"), 2, "cannot be combined"),
        (("inspect", "facebook/opt-125m", "--offline"), 4, "hf download"),
        (("pull", "oci://registry.example/x", "--offline"), 4, "--offline"),
        (("push", "nothing", "there"), 3, "nothing"),
        (("export", "nothing"), 3, "coldstart materialize"),
        (("pull", "missing"), 1, "missing"),
        (("trust", "add", "missing.pub"), 2, "trust show"),
    ],
)
def test_failure_is_reported_with_its_hint(run: Run, argv: tuple[str, ...], code: int, words: str) -> None:
    done = run(*argv, code=code)
    assert words in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_no_command_shows_help(run: Run) -> None:
    done = run(code=None)
    assert "inspect" in done.stdout + done.stderr


def read_error(run: Run, *words: str) -> dict[str, Any]:
    done = run(*words, code=2)
    assert done.stdout == ""
    error: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    assert error["exit_code"] == 2 and error["schema_version"] >= 2
    return error


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("inspect no-such-bundle", "no-such-bundle", "use one of tiny-llama"),
        ("serve tiny-llama --port 99999", "99999 is not in the range", "coldstart serve --help"),
        ("serve", "Missing argument 'MODEL'", "coldstart serve --help"),
        ("list --no-such-option", "No such option: --no-such-option", "coldstart list --help"),
        ("--cache-dir /x list", "coldstart COMMAND --cache-dir", "coldstart --help"),
        ("--version=3 list", "does not take a value", ""),
        ("lisst", "Did you mean 'list'?", "coldstart --help"),
        ("import /nonexistent.tar", "/nonexistent.tar", ""),
    ],
)
def test_error_is_one_object(words: str, message: str, hint: str, run: Run) -> None:
    for form in ("--format json", "--format=json"):
        error = read_error(run, *f"{words} {form}".split())
        assert message in error["error"] and hint in (error["hint"] or "")


def test_format_of_host_run_applies_to_host_with_a_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLDSTART_HOST_RUN_FORMAT", "json")
    assert "neither a command" in read_error(run, "host", "bogus")["error"]
    said = run("host", "status", "--url", "http://127.0.0.1:9", code=1).stderr
    assert said.startswith("error: no host responds")


@pytest.mark.parametrize("typed", ["m --max-model-len 1024", "--max-model-len=1024 m"])
@pytest.mark.parametrize("command", ["serve", "host run"])
def test_the_hint_shows_the_option_after_two_dashes(command: str, typed: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([*command.split(), *typed.split()])
    assert (caught.value.hint or "").endswith(f"coldstart {command} ... -- --max-model-len")
