"""Named keys of clients: the file, its errors, and changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.client_key_files import write_clients

from coldstart.errors import UsageError
from coldstart.host.endpoint import ClientKeys, GatewayEndpoint


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
        ("[a\n", "as TOML: "),
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


def test_key_of_the_operator_is_refused_as_a_clients_key(tmp_path: Path) -> None:
    keys = ClientKeys(write_clients(tmp_path, {"laptop": ""}))
    with pytest.raises(UsageError, match="also the key of client laptop"):
        GatewayEndpoint(api_key="key-of-laptop", client_keys=keys).check()


def test_file_without_a_client_is_valid_beside_the_key_of_the_operator_only(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("# all revoked\n")
    endpoint = GatewayEndpoint(api_key="operators-key", client_keys=ClientKeys(file))
    endpoint.check()
    assert endpoint.requires_key
    with pytest.raises(UsageError, match=f"{file} contains no client") as caught:
        GatewayEndpoint(client_keys=ClientKeys(file)).check()
    assert 'key_file = "FILE"' in str(caught.value.hint)


def test_a_key_file_that_other_users_can_read_is_named_with_a_remedy(tmp_path: Path) -> None:
    keys = ClientKeys(write_clients(tmp_path, {"laptop": "", "ci": ""}))
    (exposed := tmp_path / "laptop.key").chmod(0o644)
    (note,) = keys.describe_exposed_files()
    assert f"chmod 600 {exposed}" in note
    exposed.chmod(0o640)
    assert not list(keys.describe_exposed_files())
