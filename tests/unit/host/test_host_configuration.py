"""The host's TOML file: its members, and errors about invalid files."""

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.client_key_files import write_clients

from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.host import configuration
from coldstart.host.configuration import check_cron_expression, find_next_moment, load, parse
from coldstart.host.endpoint import ClientKeys, GatewayEndpoint
from coldstart.host.launches import Catalogue, Destination, Launch

SIZED = 'memory = "1GiB"\n'
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
    typed = load(tmp_path / "host.toml", typed={"models": {model.name: {"idle_s": 5}}})
    assert typed.models == (replace(model, idle_s=5),)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no model is configured: at least one table .models.NAME. is required"),
        (MODEL, "missing key memory"),
        (SIZED + 'police = "lru"\n' + MODEL, "unknown key police"),
        (SIZED + 'policy = "arc"\n' + MODEL, "policy: unknown eviction policy 'arc'"),
        ("memory = 0\n" + MODEL, "memory: --memory must be at least 1, found 0"),
        (SIZED + "loaders = 0\n" + MODEL, "loaders: loaders must be at least 1, found 0"),
        (
            SIZED + "hang_timeout_s = 0.5\n" + MODEL,
            "hang_timeout_s: --hang-timeout must be at least 1, found 0.5",
        ),
        (SIZED + "ready_timeout_s = -1\n" + MODEL, "ready_timeout_s: invalid duration -1"),
        (SIZED + "hang_timeout_s = inf\n" + MODEL, "hang_timeout_s: invalid duration inf"),
        (SIZED + "max_residents = 0\n" + MODEL, "max_residents: --max-residents must be at least 1, found 0"),
        (
            SIZED + MODEL + 'tiers = [{name = "x", memory = "2GiB", penalty_s = 1}]\n',
            "models.m.tiers: x uses more memory or has a shorter penalty than awake",
        ),
        (
            SIZED + MODEL + 'tiers = [{name = "awake", memory = 5, penalty_s = 1}]\n',
            "models.m.tiers: expected unique names from awake to stopped, found awake, awake, stopped",
        ),
        ('memory = "a lot"\n' + MODEL, "memory: invalid size 'a lot'"),
        ("memory = 1.5\n" + MODEL, "memory: invalid size 1.5"),
        (SIZED + 'max_held = "many"\n' + MODEL, "max_held: expected `int`, got `str`"),
        (SIZED + "hold_s = 0\n" + MODEL, "hold_s must be above 0, found 0"),
        (SIZED + "[models.m]\nstart_s = 1\n", "models.m: missing key memory"),
        (
            SIZED + MODEL + 'tiers = [{name = "x", memory = 5}]\n',
            r"models\.m\.tiers\[0\]: missing key penalty_s",
        ),
        (
            SIZED + MODEL + 'tiers = [{name = "asleep-1", penalty_s = 1}]\n',
            r"models\.m\.tiers: the memory of asleep-1 is unknown, because no bundle has measured it",
        ),
        (
            SIZED + MODEL + 'args = ["--nnodes", "2"]\ntiers = [{name = "parked", penalty_s = 1}]\n',
            "models.m.tiers: parking supports only one engine on one host, but --nnodes is 2",
        ),
        (SIZED + "models = 3\n", "no model is configured: at least one table .models.NAME. is required"),
        (SIZED + "[models]\nm = 3\n", "models.m: expected a table, found 3"),
        (SIZED + MODEL + "tiers = [3]\n", r"models\.m\.tiers\[0\]: expected a table, found 3"),
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
        (0, r"models\.a\.devices: expected `array`"),
        ([0], r"models\.b: missing key `devices`"),
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


def test_tier_without_memory_has_that_of_the_bundle() -> None:
    tier = {"name": "parked", "penalty_s": 1.0}
    table = {"memory": 10, "models": {"m": {"memory": 5, "start_s": 2.0, "tiers": [tier]}}}
    known = configuration.Profile(7, 3.0, "bundle", shared=1, tiers={"parked": 0})
    (model,) = parse(table, lambda launch: known).models
    assert [(tier.name, tier.memory, tier.penalty_s) for tier in model.tiers] == [
        ("awake", 5, 0.0), ("parked", 0, 1.0), ("stopped", 0, 2.0)
    ]  # fmt: skip


SIZES = {"small": "60GiB", "large": "61GiB"}


def _launch(name: str, *args: str, aliases: tuple[str, ...] = ()) -> Launch:
    return Launch(name, name, Arguments(args), aliases)


def test_every_name_leads_to_its_model_under_the_name_its_server_knows() -> None:
    tuned = _launch("a", "--lora-modules", "x=/x", '{"name": "y", "path": "/y"}', aliases=("alpha",))
    named = _launch("b", "--served-model-name", "first", "second")
    catalogue = Catalogue([tuned, named])
    routes = {
        name: catalogue.find_destination(name) for name in ("a", "alpha", "x", "y", "b", "first", "second")
    }
    assert routes == {
        "a": Destination("a", "a"), "alpha": Destination("a", "a"), "x": Destination("a", "x"), "y": Destination("a", "y"),
        "b": Destination("b", "first"), "first": Destination("b", "first"), "second": Destination("b", "first"),
    }  # fmt: skip
    assert catalogue.find_destination("nobody") is None and catalogue.find_destination(None) is None
    assert {Catalogue([tuned]).find_destination(name) for name in (None, "")} == {Destination("a", "a")}
    assert named.served_names == ("first", "second")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"mode": "quickly"}, "unknown mode 'quickly'"),
        ({"on_miss": "materialize"}, "invalid on_miss 'materialize'"),
        ({"args": ["--port", "1"]}, "args must not contain --port, which the host sets"),
        ({"args": [5]}, r"args\[0\]: expected `str`, got `int`"),
        ({"pinned": "yes"}, "pinned: expected `bool`, got `str`"),
        ({"idle": 5}, "models.m: unknown key idle"),
    ],
)
def test_invalid_arguments_are_named(given: dict[str, object], complaint: str) -> None:
    model = {"memory": 5, "start_s": 1.0, **given}
    with pytest.raises(UsageError, match=complaint):
        configuration.parse({"memory": 10, "models": {"m": model}})


@pytest.fixture
def _berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def _utc(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.usefixtures("_berlin")
@pytest.mark.parametrize(
    ("expression", "now", "moments"),
    [
        # Friday 27 November 2026, 8:00 in Berlin is 7:00 UTC; then Monday.
        ("0 8 * * 1-5", "2026-11-26 12:00", ["2026-11-27 07:00", "2026-11-30 07:00", "2026-12-01 07:00"]),
        ("0 8 * * 1-5", "2026-11-27 07:00", ["2026-11-30 07:00"]),
        (
            "*/20 6-7,22 * * *",
            "2026-01-05 06:30",
            ["2026-01-05 06:40", "2026-01-05 21:00", "2026-01-05 21:20"],
        ),
        ("0 0 29 feb *", "2026-01-01 00:00", ["2028-02-28 23:00"]),
        ("30 9 1 jan,jul mon", "2026-12-01 00:00", ["2027-01-01 08:30", "2027-01-04 08:30"]),
        ("5 4 * * sun", "2026-11-25 00:00", ["2026-11-29 03:05"]),
        # 28 March 2027: 2:00 becomes 3:00. 31 October 2027: 3:00 becomes 2:00.
        ("0 8 * * *", "2027-03-27 00:00", ["2027-03-27 07:00", "2027-03-28 06:00"]),
        ("30 2 * * *", "2027-03-27 12:00", ["2027-03-28 01:30", "2027-03-29 00:30"]),
        ("30 2 * * *", "2027-10-30 12:00", ["2027-10-31 00:30", "2027-11-01 01:30"]),
    ],
)
def test_moments_are_those_of_the_calendar(expression: str, now: str, moments: list[str]) -> None:
    at = _utc(now)
    for wanted in moments:
        at = find_next_moment(expression, at)
        assert datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M") == wanted


@pytest.mark.usefixtures("_berlin")
def test_moment_is_ahead_within_the_repeated_hour() -> None:
    # 2:15 for the second time: 2:30 comes in a quarter of an hour, for the second time.
    now = _utc("2027-10-31 01:15")
    assert find_next_moment("*/30 * * * *", now) == now + 900


@pytest.mark.usefixtures("_berlin")
@pytest.mark.parametrize(
    "given",
    ["", "8:00", "0 8 * *", "0 0 8 * * 1", "60 8 * * *", "0 8 * * 8", "0 8 30 2 *", "*/0 * * * *", "@daily", 8, "x" * 9999],
)  # fmt: skip
def test_invalid_expression_is_refused_with_a_hint(given: object) -> None:
    with pytest.raises(UsageError, match="cron expression") as caught:
        check_cron_expression(given)
    assert "0 8 * * 1-5" in (caught.value.hint or "") and len(caught.value.message) < 300


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
def test_unusable_file_is_refused_with_its_place(tmp_path: Path, content: str, reason: str) -> None:
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
