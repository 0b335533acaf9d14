"""A ready file proves the fast path only where it reports every section as used."""

import pytest

from coldstart.validate.readiness import explain_slow_path


@pytest.mark.parametrize(
    ("readiness", "reasons"),
    [
        ({"fast_path": {"compile": True}, "fallbacks": []}, []),
        ({}, ["the ready file does not report the used sections"]),
        ({"fast_path": {"compile": True}}, ["the ready file does not report the used sections"]),
        ({"fast_path": {}, "fallbacks": []}, ["no section of the bundle was used"]),
        ({"fast_path": {}, "fallbacks": [], "canary": True}, []),
        ({"fast_path": {"compile": False}, "fallbacks": []}, ["compile was not used"]),
        (
            {"fast_path": {"compile": False}, "fallbacks": [{"section": "compile", "reason": "another ISA"}]},
            ["compile: another ISA"],
        ),
    ],
)
def test_the_slow_path_is_explained_by_the_ready_file(
    readiness: dict[str, object], reasons: list[str]
) -> None:
    assert explain_slow_path(readiness) == reasons
