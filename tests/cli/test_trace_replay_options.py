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
# Options as typed, by the kinds in which they have an effect.
BY_KINDS = {
    ALL: [
        "--columns time=t,prompt=p,output=o", "--speedup 2", "--duration 1", "--limit 1", "--rate 1", "--cv 2 --rate 1",
        "--sweep 1,2 --slo ttft=1", "--rounds 2 --rate 1", "--rounds 2 --sweep 1,2 --slo ttft=1", "--seed 1 --rate 1",
        "--seed 1 --models a,b --model-mapping zipf", "--max-output 9", "--models a,b", "--slo ttft=1", "--export json",
        "--model-mapping zipf --models a,b",
    ],
    ("servers",): ["--rounds 2", "--seed 1", "--target http://127.0.0.1:3", "--model m", "--timeout 9"],
    ("servers", "engine", "host"): ["--max-prompt 9"],
    ("engine", "host", "fleet"): [f"{PROFILE} --max-prompt 9", "--simulate", PROFILE],
    ("engine", "host"): ["--host two.toml"],
    ("engine", "fleet"): ["--fleet two-fleet.toml"],
    ("engine",): [
        MLFQ, f"--scheduler fcfs {MLFQ} --scheduler deadline", f"--scheduler fcfs {MLFQ} --sweep 1,2 --slo ttft=1",
        f"--alpha 1 --scheduler fcfs {MLFQ}", "--kv-blocks 9", "--batch 2", f"--quantum 1 {MLFQ}", f"--eta 2 {MLFQ}",
        f"--alpha 1 {MLFQ}", f"--mlfq paper {MLFQ}", f"--oldest-share 0.5 {MLFQ}", f"--reserve 0.5 {MLFQ}",
        "--deadline-factor 9 --scheduler deadline", "--deadline-slo 9 --scheduler deadline",
        f"--kv-strategy recompute {MLFQ}", f"--kv-host-memory 1000 {MLFQ}",
    ],
}  # fmt: skip
EFFECTS = {option: kinds for kinds, options in BY_KINDS.items() for option in options}
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
