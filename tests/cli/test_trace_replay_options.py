"""Every option of trace-replay in each kind of replay: one without effect there is an error that names both."""

import json
import shlex
from pathlib import Path

import pytest
from coldstart.commands import cli
from coldstart.commands._options import SHARED
from tools.command_line import main

PROFILE = "--profile profile.json"
KINDS = {
    "servers": "--target http://127.0.0.1:1 --target http://127.0.0.1:2",
    "engine": f"--simulate {PROFILE}",
    "host": f"--simulate --host host.toml {PROFILE}",
    "fleet": "--simulate --fleet fleet.toml",
}
ALL = tuple(KINDS)
MLFQ = "--scheduler skip-join-mlfq"
# Options as typed, and the kinds in which they have an effect.
EFFECTS = {
    "--columns time=t,prompt=p,output=o": ALL,
    "--speedup 2": ALL,
    "--duration 1": ALL,
    "--limit 1": ALL,
    "--rate 1": ALL,
    "--sweep 1,2 --slo ttft=1": ALL,
    "--cv 2 --rate 1": ALL,
    "--rounds 2": ("servers",),
    "--rounds 2 --rate 1": ALL,
    "--rounds 2 --sweep 1,2 --slo ttft=1": ALL,
    "--seed 1": ("servers",),
    "--seed 1 --rate 1": ALL,
    "--seed 1 --models a,b --model-mapping zipf": ALL,
    "--max-prompt 9": ("servers", "engine", "host"),
    f"{PROFILE} --max-prompt 9": ("engine", "host", "fleet"),
    "--max-output 9": ALL,
    "--models a,b": ALL,
    "--model-mapping zipf --models a,b": ALL,
    "--target http://127.0.0.1:3": ("servers",),
    "--model m": ("servers",),
    "--timeout 9": ("servers",),
    "--simulate": ("engine", "host", "fleet"),
    PROFILE: ("engine", "host", "fleet"),
    "--kv-blocks 9": ("engine",),
    "--host two.toml": ("engine", "host"),
    "--fleet two-fleet.toml": ("engine", "fleet"),
    "--slo ttft=1": ALL,
    MLFQ: ("engine",),
    f"--scheduler fcfs {MLFQ} --scheduler deadline": ("engine",),
    f"--alpha 1 --scheduler fcfs {MLFQ}": ("engine",),
    f"--scheduler fcfs {MLFQ} --sweep 1,2 --slo ttft=1": ("engine",),
    "--batch 2": ("engine",),
    f"--quantum 1 {MLFQ}": ("engine",),
    f"--eta 2 {MLFQ}": ("engine",),
    f"--alpha 1 {MLFQ}": ("engine",),
    f"--mlfq paper {MLFQ}": ("engine",),
    f"--oldest-share 0.5 {MLFQ}": ("engine",),
    f"--reserve 0.5 {MLFQ}": ("engine",),
    "--deadline-factor 9 --scheduler deadline": ("engine",),
    "--deadline-slo 9 --scheduler deadline": ("engine",),
    f"--kv-strategy recompute {MLFQ}": ("engine",),
    f"--kv-host-memory 1000 {MLFQ}": ("engine",),
    "--export json": ALL,
}
# Options that have no effect beside others, or without them: kind, options, and the words of the error.
BESIDE = [
    ("engine", "--cv 2", "--cv has no effect without --rate"),
    ("host", "--seed 1", "--seed has no effect in a replay on a simulated host (--host) without random"),
    ("engine", "--rounds 3", "--rounds has no effect in a replay on the simulated engine (--simulate) without"),
    ("fleet", "--rounds 3 --model-mapping column", "--rounds has no effect"),
    ("engine", "--scheduler auto --scheduler fcfs", "--scheduler has the same value twice"),
    ("servers", "--target http://127.0.0.1:1", "--target has the same value twice"),
    ("host", "--host host.toml", "--host has the same value twice"),
    ("servers", "--baseline a.json", "No such option: --baseline"),
    ("host", "--fleet fleet.toml", "--host and --fleet cannot be combined"),
    ("servers", "--host host.toml", "--target and --host cannot be combined"),
    ("engine", "--sweep 1,2", "--sweep requires latency limits"),
    ("engine", "--sweep 1,2 --slo ttft=1 --rate 2", "--sweep and --rate cannot be combined"),
    ("servers", "--model-mapping zipf", "--model-mapping has no effect without --models"),
    ("servers", "--model m --models a,b", "--model has no effect with --models"),
    ("fleet", "--max-prompt 9", "--max-prompt has no effect in a replay on a simulated fleet (--fleet) without"),
    ("engine", "--quantum 1 --scheduler fcfs", "cannot use --quantum with fcfs"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    profile = {"prefill": [[1, 0.01], [512, 0.05]], "decode": [[1, 0.01], [16, 0.012]]}
    (home / "profile.json").write_text(json.dumps(profile))
    models = "".join(f'[models.{name}]\nmemory = "2GB"\nsize = "1GB"\n' for name in "ab")
    for name in ("host.toml", "two.toml"):
        (home / name).write_text('memory = "8GB"\n' + models.replace('size = "1GB"', "start_s = 1"))
    server = '[servers.s]\nmemory = "24GB"\nnetwork = "1GB"\nload = "10GB"\n'
    for name in ("fleet.toml", "two-fleet.toml"):
        (home / name).write_text(server + models)


def replay(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Replay a trace and return what was said."""
    main("trace-replay", "absent.jsonl", *shlex.split(words))
    return capsys.readouterr().err


def test_the_table_covers_every_option() -> None:
    flags = {flag for one in cli.load("trace-replay").params for flag in one.opts if flag.startswith("--")}
    common = {f"--{name.replace('_', '-')}" for name in SHARED}
    assert flags - common - {"--help"} == {
        word for text in EFFECTS for word in text.split() if word.startswith("--")
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", EFFECTS)
def test_option_has_effect_or_is_refused(option: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = replay(f"{KINDS[kind]} {option}", capsys)
    if kind in EFFECTS[option]:
        assert "absent.jsonl" in said and "No such file" in said
    else:
        other = {"servers": "--target", "engine": "--simulate", "host": "--host", "fleet": "--fleet"}[kind]
        flags = [word for word in option.split() if word.startswith("--")]
        assert any(flag in said for flag in flags) and (other in said or "--simulate" in said)
        assert "\nhint: " in said and "No such file" not in said


@pytest.mark.parametrize(("kind", "options", "words"), BESIDE)
def test_an_option_without_effect_beside_others_is_refused(
    kind: str, options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in replay(f"{KINDS.get(kind, '')} {options}", capsys)
