"""The name of a trusted key is part of a file name: it must not lead out of the trust directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.errors import InvalidNameError
from tools.shell import Run

from coldstart.system import paths


@pytest.mark.parametrize("name", ["../../x", "a/b", "/x", "..", ".hidden", "", "a\nb", "a" * 65, "-x"])
def test_trust_refuses_a_name_that_is_not_a_plain_file_name(name: str, tmp_path: Path) -> None:
    pem = sign.load_public_pem(tmp_path / "state")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidNameError):
        sign.add_trusted_key(tmp_path / "trust" / "deep", pem, name=name)
    assert sorted(tmp_path.rglob("*")) == before


def test_trust_add_writes_into_the_trust_directory_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other.pem").write_bytes(sign.load_public_pem(tmp_path / "other"))
    refused = run("trust", "add", str(tmp_path / "other.pem"), "--name", "../../x", code=None)
    assert refused.returncode == 2 and "invalid key name '../../x'" in refused.stderr
    assert not list(paths.state_dir().parent.rglob("x-*.pub"))
    run("trust", "add", str(tmp_path / "other.pem"), "--name", "build-host.2")
    assert list(sign.trust_dir(paths.state_dir()).glob("build-host.2-*.pub"))
