"""A start compares versions and guards imports; our overrides take what vLLM's methods take; no other package names vLLM."""

import ast
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from coldstart import vllm
from coldstart.host.live.access_control import FORWARDED_PATHS, HEALTH, MODELS, OPEN, READ_PATHS
from coldstart.system import runtime
from coldstart.vllm import compat, late
from coldstart.vllm.engine import server
from coldstart.vllm.engine.application import EarlyApplication

ROOT = Path(__file__).parents[3]
SOURCES = [
    path for package in ("coldstart", "artifacts", "commands") for path in (ROOT / package).rglob("*.py")
]
# Not vLLM's: our loggers below its own, the entry points' group and fields of the key.
OURS = re.compile(r"vllm\.(coldstart|general_plugins|distribution$|version$)")


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "unknown"])
def test_a_version_that_was_not_checked_is_a_reason(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "find_vllm_distribution", lambda: ("vllm", version))
    reason = compat.find_unsupported_reason("start", lambda: pytest.fail("imported"))
    assert version in str(reason)
    assert str(reason).endswith("which requires vLLM 0.31 or later, but below 0.34")


def test_a_missing_name_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "find_vllm_distribution", lambda: ("vllm", "0.32.0"))

    def load() -> None:
        from pathlib import gone  # type: ignore[attr-defined]  # noqa: F401

    reason = str(compat.find_unsupported_reason("headless", load))
    assert reason.startswith("vLLM 0.32.0 lacks what the feature 'headless' needs: cannot import name 'gone'")
    assert "has no attribute" in str(compat.find_unsupported_reason("ending", lambda: SimpleNamespace().gone))


def test_a_check_imports_no_vllm() -> None:
    code = (
        "import sys; from coldstart.vllm import compat; "
        "compat.find_unsupported_reason('start'); print('vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "False"


def _names_of_vllm(path: Path) -> Iterator[str]:
    """Yield vLLM's modules that a file imports or names in strings other than docstrings."""
    tree = ast.parse(path.read_bytes())
    prose = {id(part.value) for part in ast.walk(tree) if isinstance(part, ast.Expr)}
    for one in ast.walk(tree):
        if isinstance(one, ast.Import):
            yield from (alias.name for alias in one.names if alias.name.split(".")[0] == "vllm")
        elif isinstance(one, ast.ImportFrom) and not one.level and (one.module or "").split(".")[0] == "vllm":
            yield str(one.module)
        elif isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in prose:
            found = re.findall(r"(?<!coldstart\.)\bvllm(?:\.\w+)+", one.value)
            yield from (name for name in found if not OURS.match(name))


def test_vllm_is_named_only_in_this_package() -> None:
    found = {path: set(_names_of_vllm(path)) for path in SOURCES if b"vllm" in path.read_bytes()}
    named = {path for path, names in found.items() if names}
    assert named and [path for path in named if not path.is_relative_to(ROOT / "coldstart" / "vllm")] == []


def _our_classes() -> Iterator[type]:
    """Import our modules for this device, because vLLM's CPU worker replaces parts of torch.cuda."""
    for found in pkgutil.walk_packages(vllm.__path__, f"{vllm.__name__}."):
        if runtime.targets_cpu() or found.name != "coldstart.vllm.engine.worker":
            module = importlib.import_module(found.name)
            classes = [one for one in vars(module).values() if isinstance(one, type)]
            yield from (one for one in classes if one.__module__ == module.__name__)


def _misfits(ours: type, theirs: type) -> Iterator[str]:
    yield from (f"{ours.__name__} lacks {name}" for name in getattr(ours, "__abstractmethods__", ()))
    for name, method in vars(ours).items():
        base = getattr(theirs, name, None)
        if isinstance(method, FunctionType) and isinstance(base, FunctionType) and name != "__init__":
            try:
                _call(inspect.signature(method), inspect.signature(base))
            except TypeError as error:
                yield f"{ours.__name__}.{name}: {error}, unlike {base.__qualname__}"


def _list_uncalled(ours: type) -> Iterator[str]:
    """Yield the methods that no base class has and no code of ours calls. `super()` and `kind` stand for vLLM's classes."""
    text = "\n".join(path.read_text() for path in SOURCES)
    for name, method in vars(ours).items():
        called = rf"(?<!super\(\))(?<!\bkind)\.{name}\b|[\"']{name}[\"'](?!:)|\({name},"
        inherited = name.startswith("__") or any(hasattr(base, name) for base in ours.__mro__[1:])
        if isinstance(method, FunctionType) and not inherited and not re.search(called, text):
            yield name


def _call(ours: inspect.Signature, theirs: inspect.Signature) -> None:
    """Bind each parameter of vLLM's method to ours. Raises TypeError if one is missing, renamed, or required by ours alone."""
    kinds = inspect.Parameter
    named = [one.name for one in theirs.parameters.values() if one.kind is kinds.POSITIONAL_OR_KEYWORD]
    keywords = {one.name: one.name for one in theirs.parameters.values() if one.kind is kinds.KEYWORD_ONLY}
    bound = ours.bind(*named, **keywords)
    if moved := [
        f"{name} is {value}"
        for name, value in bound.arguments.items()
        if isinstance(value, str) and name != value
    ]:
        raise TypeError(", ".join(moved))


@pytest.mark.vllm
def test_our_overrides_take_what_vllms_methods_take() -> None:
    pairs = [
        (ours, base)
        for ours in _our_classes()
        for base in ours.__mro__
        if base.__module__.split(".")[0] == "vllm"
    ]
    assert len(pairs) > 10
    assert [problem for ours, theirs in pairs for problem in _misfits(ours, theirs)] == []
    # What vLLM called by another name before a rename is called by nobody.
    assert [
        f"{ours.__name__}.{name}" for ours in {ours for ours, _ in pairs} for name in _list_uncalled(ours)
    ] == []


def test_modules_are_worked_on_when_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Work of other tests on modules that are not imported here stays pending.
    before, seen = list(sys.meta_path), list[int]()
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for more in (0, 1):
        late.run_when_imported("late_module", lambda module, more=more: seen.append(module.value + more))  # type: ignore[misc]
    assert seen == [] and "late_module" not in sys.modules
    importlib.import_module("late_module")
    assert sorted(seen) == [1, 2] and sys.meta_path == before
    late.run_when_imported("late_module", lambda module: seen.append(3))
    assert seen[-1] == 3


def _begun(args: Namespace, config: Any) -> EarlyApplication:
    early = EarlyApplication()
    early.start_building_after_fork(args, config)
    if (pid := os.fork()) == 0:  # as the start of an engine does
        os._exit(0)
    os.waitpid(pid, 0)
    return early


@pytest.fixture
def arguments() -> tuple[Namespace, Any]:
    args, _ = server.parse_args(["--model", "some/model", "--api-key", "k", "--root-path", "/here"])
    return args, Namespace(model_config=Namespace(get_pooling_task=lambda tasks: None))


def _routes(app: Any) -> list[tuple[str, str]]:
    return [(type(route).__name__, route.path) for route in app.routes]


@pytest.mark.vllm
def test_vllm_receives_an_equal_application(arguments: tuple[Namespace, Any]) -> None:
    from vllm.entrypoints.launchers.api_server import entry

    args, config = arguments
    stock = entry.build_app
    early = _begun(args, config)
    with early.provide_to_vllm():
        one = entry.build_app(args, ("generate",), config.model_config)
        assert entry.build_app(args, ("generate",), config.model_config) is one
    assert entry.build_app is stock
    other = stock(args, ("generate",), config.model_config)
    assert one is not other
    assert _routes(one) == _routes(other)
    assert (one.root_path, one.state.args) == ("/here", args)
    assert [one.cls for one in one.user_middleware] == [one.cls for one in other.user_middleware]


@pytest.mark.vllm
def test_gateway_forwards_no_route_of_development_mode(
    arguments: tuple[Namespace, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.entrypoints.launchers.app import build_app

    def paths() -> set[str]:
        app = build_app(args, ("generate",), config.model_config)
        return {path for _, path in _routes(app)}

    args, config = arguments
    closed = paths()
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    opened = paths() - closed
    assert {"/sleep", "/wake_up", "/collective_rpc", "/server_info", "/update_weights"} <= opened
    assert not opened & {*FORWARDED_PATHS, *READ_PATHS, *OPEN, HEALTH, MODELS}


@pytest.mark.vllm
def test_other_vllm_is_not_changed(arguments: tuple[Namespace, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.launchers.api_server import entry

    monkeypatch.setattr(compat, "find_unsupported_reason", lambda feature, load=None: f"no {feature}")
    stock = entry.build_app
    with _begun(*arguments).provide_to_vllm():
        assert entry.build_app is stock
