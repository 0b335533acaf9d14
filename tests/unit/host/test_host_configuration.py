"""The host's TOML file: its members, and errors about invalid files."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldstart.errors import UsageError
from coldstart.host import configuration
from coldstart.host.configuration import load, parse

MODEL = '[models.m]\nmemory = "1GiB"\nstart_s = 2\n'

ROOT = Path(__file__).parents[3]


def test_example_of_the_documentation_is_read(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    example = page.partition("## Host file")[2].partition("## Fleet file")[0].partition("```toml\n")[2]
    (tmp_path / "host.toml").write_text(example.partition("```")[0])
    file = load(tmp_path / "host.toml")
    assert (file.settings.memory, file.settings.policy) == (60 << 30, "predictive")
    (model,) = file.models
    assert [(tier.name, tier.memory, tier.penalty_s, tier.host_memory) for tier in model.tiers] == [
        ("awake", 14 << 30, 0.0, 0),
        ("asleep-1", 1 << 30, 0.5, 14 << 30),
        ("stopped", 0, 8.0, 0),
    ]
    assert model.idle_s == 600 and not model.pinned


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no model is configured: at least one table .models.NAME. is required"),
        (MODEL, "missing key memory"),
        ('memory = "1GiB"\npolice = "lru"\n' + MODEL, "unknown key police"),
        ('memory = "1GiB"\npolicy = "arc"\n' + MODEL, "policy: unknown policy 'arc'"),
        (
            'memory = "1GiB"\nwhen_full = "wait"\n' + MODEL,
            "when_full: --when-full must be one of queue, refuse, got 'wait'",
        ),
        ("memory = 0\n" + MODEL, "memory: --memory must be at least 1, got 0"),
        ('memory = "1GiB"\nloaders = 0\n' + MODEL, "loaders: loaders must be at least 1, got 0"),
        (
            'memory = "1GiB"\nhang_timeout_s = 0.5\n' + MODEL,
            "hang_timeout_s: --hang-timeout must be at least 1, got 0.5",
        ),
        ('memory = "1GiB"\nready_timeout_s = -1\n' + MODEL, "ready_timeout_s: invalid time -1"),
        ('memory = "1GiB"\nhang_timeout_s = inf\n' + MODEL, "hang_timeout_s: invalid time inf"),
        (
            'memory = "1GiB"\nmax_residents = 0\n' + MODEL,
            "max_residents: --max-residents must be at least 1, got 0",
        ),
        (
            'memory = "1GiB"\n' + MODEL + 'tiers = [{name = "x", memory = "2GiB", penalty_s = 1}]\n',
            "models.m.tiers: x uses more memory or has a shorter penalty than awake",
        ),
        (
            'memory = "1GiB"\n' + MODEL + 'tiers = [{name = "awake", memory = 5, penalty_s = 1}]\n',
            "models.m.tiers: expected unique names from awake to stopped, found awake, awake, stopped",
        ),
        ('memory = "a lot"\n' + MODEL, "memory: invalid size 'a lot'"),
        ("memory = 1.5\n" + MODEL, "memory: invalid size 1.5"),
        ('memory = "1GiB"\nmax_held = "many"\n' + MODEL, "max_held: expected `int`, got `str`"),
        ('memory = "1GiB"\n[models.m]\nstart_s = 1\n', "models.m: missing key memory"),
        ('memory = "1GiB"\n' + MODEL + "idle_s = -1\n", "models.m.idle_s: invalid time -1"),
        (
            'memory = "1GiB"\n' + MODEL + 'tiers = [{name = "x", memory = 5}]\n',
            r"models\.m\.tiers\[0\]: missing key penalty_s",
        ),
        (
            'memory = "1GiB"\nmodels = 3\n',
            "no model is configured: at least one table .models.NAME. is required",
        ),
        ('memory = "1GiB"\n[models]\nm = 3\n', "models.m: expected a table, found 3"),
        ('memory = "1GiB"\n' + MODEL + "tiers = [3]\n", r"models\.m\.tiers\[0\]: expected a table, found 3"),
        ('memory = "1GiB"\nresume_streams = 1\n' + MODEL, "resume_streams: expected `bool`, got `int`"),
        ("memory = ", "as TOML: "),
    ],
)
def test_a_wrong_file_is_named_with_its_fault(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "host.toml").write_text(text)
    with pytest.raises(UsageError, match=complaint) as problem:
        load(tmp_path / "host.toml")
    assert "host.toml" in problem.value.message and problem.value.hint


@pytest.mark.parametrize(
    ("devices", "complaint"),
    [
        ([0, 0], r"models\.a\.devices: expected distinct GPU indices \(0 or greater\), found \[0, 0\]"),
        ([-1], r"models\.a\.devices: expected distinct GPU indices"),
        (["0"], r"models\.a\.devices\[0\]: expected `int`"),
        ([True], r"models\.a\.devices\[0\]: expected `int`"),
        (0, r"models\.a\.devices: expected `array`"),
        ([0], r"models\.b: missing key devices"),
    ],
)
def test_wrong_devices_are_named(devices: object, complaint: str) -> None:
    figures = {"memory": 10, "start_s": 1.0}
    with pytest.raises(UsageError, match=complaint):
        parse({"memory": 40, "models": {"a": {**figures, "devices": devices}, "b": figures}})


def test_describe_limits_names_the_machine_and_each_model_that_the_limit_does_not_allow() -> None:
    table = {
        "memory": "60GiB",
        "models": {name: {"memory": size, "start_s": 1.0} for name, size in SIZES.items()},
    }
    file = parse(table)
    assert list(configuration.describe_limits(file, 64 << 30)) == [
        "large needs 61.00 GiB (file), but the memory limit is 60.00 GiB: its requests are rejected"
    ]
    above, _ = configuration.describe_limits(file, 24 << 30)
    assert above == "the memory limit is 60.00 GiB, but this machine has 24.00 GiB"
    assert len(list(configuration.describe_limits(file, None))) == 1
    (above, *_) = configuration.describe_limits(parse(table | {"memory": "1200MiB"}), 1 << 30)
    assert above == "the memory limit is 1200.0 MiB, but this machine has 1024.0 MiB"


SIZES = {"small": "60GiB", "large": "61GiB"}
