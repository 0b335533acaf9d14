"""The configuration file: its location, unknown names, and its precedence."""

from pathlib import Path

import pytest
from coldstart.commands import config_file

from coldstart.errors import UsageError

COMMANDS = ("serve", "list", "trace-replay")
SHARED = ("format", "cache_dir")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def load(file: Path) -> dict[str, dict[str, object]]:
    return config_file.load(["list", "--config", str(file)], COMMANDS, SHARED)


def test_tables_and_shared_names(file: Path) -> None:
    file.write_text('cache-dir = "c"\n[serve]\nport = 8000\nready-timeout = 5\n[trace-replay]\nseed = 1\n')
    loaded = load(file)
    assert loaded["serve"] == {"cache_dir": "c", "port": 8000, "ready_timeout": 5}
    assert loaded["trace-replay"] == {"cache_dir": "c", "seed": 1}
    assert loaded["list"] == {"cache_dir": "c"}


@pytest.mark.parametrize("text", ["colour = 1", "[sevre]\nport = 1"])
def test_unknown_names_are_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError, match="unknown setting"):
        load(file)


def test_bad_toml_names_the_file(file: Path) -> None:
    file.write_text("= 1")
    with pytest.raises(UsageError, match=r"config\.toml"):
        load(file)


def test_a_named_file_must_exist(file: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load(file)


def test_locate_prefers_flag_then_environment_then_user_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("flag", "env", "coldstart/config"):
        (tmp_path / f"{name}.toml").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.toml").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("COLDSTART_CONFIG", raising=False)
    assert config_file.locate([]) == tmp_path / "coldstart" / "config.toml"
    monkeypatch.setenv("COLDSTART_CONFIG", str(tmp_path / "env.toml"))
    assert config_file.locate([]) == tmp_path / "env.toml"
    assert config_file.locate([f"--config={tmp_path / 'flag.toml'}"]) == tmp_path / "flag.toml"


def test_load_gives_a_hint_when_the_file_is_no_toml(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[serve")
    with pytest.raises(UsageError, match=r"config\.toml cannot be read") as caught:
        config_file.load(["--config", str(tmp_path / "config.toml")], ["serve"], ["format"])
    assert "--config FILE" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["[serve", "a = [", "a=" + "[" * 5000, "\x00", "port = 08"])
def test_load_shows_the_form_of_the_file_when_it_is_no_toml(text: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(UsageError, match=r"config\.toml cannot be read") as caught:
        load(file)
    assert str(caught.value.hint).startswith("write TOML, such as [serve]")


def test_a_directory_is_no_configuration_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a regular file"):
        load(tmp_path)
