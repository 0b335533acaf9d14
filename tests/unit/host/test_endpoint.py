"""Named keys of clients: the file, its errors, and changes."""

from __future__ import annotations

import shutil
import subprocess
from math import inf
from pathlib import Path

import pytest
from support.client_key_files import write_clients

from coldstart.errors import UsageError
from coldstart.host.endpoint import ClientKeys, GatewayEndpoint, GatewayLimits
from coldstart.host.live.headers import parse_keep_alive
from coldstart.scheduling.declaration import list_settings


def test_find_returns_the_client_of_a_key(tmp_path: Path) -> None:
    keys = ClientKeys(write_clients(tmp_path, {"laptop": "", "ci": "admin = true"}))
    found = [
        keys.find(key) for key in (b"key-of-laptop", b"key-of-ci", b"key-of-lapto", b"", "schlüssel".encode())
    ]
    assert [one and (one.name, one.admin) for one in found] == [
        ("laptop", False),
        ("ci", True),
        None,
        None,
        None,
    ]


def test_no_representation_shows_a_key(tmp_path: Path) -> None:
    client = ClientKeys(write_clients(tmp_path, {"laptop": ""})).find(b"key-of-laptop")
    assert "key-of" not in repr(client)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[a]\n", "missing key key_file"),
        ("[a]\nkey_file = 3\n", "a.key_file: expected `str`"),
        ('[a]\nkey_file = "absent"\n', "absent: No such file"),
        ('[a]\nkey_file = "empty"\n', "expected one line of ASCII"),
        ('[a]\nkey_file = "one"\nmodel = "x"\n', "unknown key model"),
        ('[a]\nkey_file = "one"\nkey = "secret"\n', "unknown key key"),
        ('[a]\nkey_file = "one"\nmodels = "x"\n', "a.models: expected `array`"),
        ('[a]\nkey_file = "one"\nrequests_per_minute = 60\n', "a: unknown key requests_per_minute"),
        ('[a]\nkey_file = "one"\n[b]\nkey_file = "one"\n', "a and b have the same key"),
        ("a = 1\n", "expected a table"),
        ("[a\n", "is not TOML"),
    ],
)
def test_file_that_cannot_be_used_is_refused_with_its_place(
    tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / "one").write_text("key-of-one\n")
    (tmp_path / "empty").write_text("\n")
    file = tmp_path / "keys.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=reason) as caught:
        ClientKeys(file)
    assert str(file) in caught.value.message and "key-of-one" not in caught.value.message


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_hint_for_an_absent_key_file_makes_it(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[laptop]\nkey_file = "my laptop.key"\n')
    with pytest.raises(UsageError) as caught:
        ClientKeys(file)
    subprocess.run(caught.value.hint.removeprefix("make a key: "), shell=True, check=True)
    key = tmp_path / "my laptop.key"
    assert ClientKeys(file).find(key.read_bytes().strip()) and key.stat().st_mode & 0o777 == 0o600


def test_key_of_the_operator_is_refused_as_a_clients_key(tmp_path: Path) -> None:
    keys = ClientKeys(write_clients(tmp_path, {"laptop": ""}))
    with pytest.raises(UsageError, match="also the key of laptop"):
        GatewayEndpoint(api_key="key-of-laptop", client_keys=keys).check()


def test_file_without_a_client_is_valid_beside_the_key_of_the_operator_only(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("# all revoked\n")
    endpoint = GatewayEndpoint(api_key="operators-key", client_keys=ClientKeys(file))
    endpoint.check()
    assert endpoint.requires_key
    with pytest.raises(UsageError, match=f"{file}: names no client") as caught:
        GatewayEndpoint(client_keys=ClientKeys(file)).check()
    assert 'key_file = "FILE"' in str(caught.value.hint)


def test_clients_keys_permit_to_listen_for_other_machines(tmp_path: Path) -> None:
    GatewayEndpoint("0.0.0.0", client_keys=ClientKeys(write_clients(tmp_path, {"laptop": ""}))).check()


def test_changed_keys_are_read_and_the_former_ones_remain_after_an_error(tmp_path: Path) -> None:
    file = write_clients(tmp_path, {"laptop": ""})
    keys = ClientKeys(file)
    assert not keys.have_changed()
    (tmp_path / "laptop.key").write_text("another-key\n")
    assert keys.have_changed()
    keys.read()
    assert keys.find(b"key-of-laptop") is None and keys.find(b"another-key")
    file.write_text("[laptop\n")
    with pytest.raises(UsageError, match="is not TOML"):
        keys.read()
    assert not keys.have_changed()  # an error is reported once
    assert keys.find(b"another-key")
    write_clients(tmp_path, {"ci": ""})
    assert keys.have_changed()
    keys.read()
    assert keys.find(b"another-key") is None and keys.find(b"key-of-ci")


def test_read_revokes_the_last_client_when_its_table_is_removed(tmp_path: Path) -> None:
    file = write_clients(tmp_path, {"laptop": ""})
    keys = ClientKeys(file)
    file.write_text("")
    keys.read()
    assert keys.clients == () and keys.find(b"key-of-laptop") is None


def test_a_key_file_that_other_users_can_read_is_named_with_a_remedy(tmp_path: Path) -> None:
    keys = ClientKeys(write_clients(tmp_path, {"laptop": "", "ci": ""}))
    (exposed := tmp_path / "laptop.key").chmod(0o644)
    (note,) = keys.describe_exposed_files()
    assert f"chmod 600 {exposed}" in note
    exposed.chmod(0o640)
    assert not list(keys.describe_exposed_files())


def test_read_finds_a_key_file_that_appears_after_its_table(tmp_path: Path) -> None:
    keys = ClientKeys(write_clients(tmp_path, {"laptop": ""}))
    write_clients(tmp_path, {"laptop": "", "ci": ""})
    (tmp_path / "ci.key").unlink()
    with pytest.raises(UsageError, match=r"ci\.key"):
        keys.read()
    (tmp_path / "ci.key").write_text("key-of-ci\n")
    assert keys.have_changed()
    keys.read()
    assert keys.find(b"key-of-ci")
    assert keys.find(b"key-of-ci")


PAGE = Path(__file__).parents[3] / "docs" / "reference" / "gateway-limits.md"


def test_each_limit_is_documented_with_its_default() -> None:
    page, default = PAGE.read_text(encoding="utf-8"), GatewayLimits()
    for name, one in list_settings(GatewayLimits):
        value = getattr(default, name)
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        assert f"| `{one.flag} {one.unit}` | {shown} |" in page


@pytest.mark.parametrize("name", [name for name, _ in list_settings(GatewayLimits)])
def test_limit_of_zero_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="must be"):
        GatewayLimits(**{name: 0})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("300", 300), ("0", 0), ("1.5", 1.5), ("5m", 300), ("1h30m", 5400), ("90s", 90), ("500ms", 0.5), (" 5m ", 300),
        ("-1", inf), ("-1s", inf), ("-5m", inf), ("9" * 400, inf),
    ],
)  # fmt: skip
def test_keep_alive_is_read_as_seconds(text: str, seconds: float) -> None:
    assert parse_keep_alive(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "-", "m", "5x", "5 m", "nan", "inf", "1e3", "5m5", "--1", "\u0665", "1_0", "x" * 10_000]
)
def test_keep_alive_is_refused_when_it_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="invalid keep-alive") as caught:
        parse_keep_alive(text)
    assert len(str(caught.value)) < 200
