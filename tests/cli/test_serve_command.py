"""coldstart serve refuses a scheduler that cannot be before it looks at the model."""

import pytest
from tools.shell import Run

OURS = ("--scheduler", "skip-join-mlfq")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--scheduler", "magic"), "unknown policy 'magic'"),
        (("--scheduler", "express"), "use --scheduler auto or --scheduler skip-join-mlfq"),
        (
            ("--kv-host-memory", "1", "--", "--kv-transfer-config", "{}"),
            "--kv-host-memory sets --kv-transfer-config",
        ),
        ((*OURS, "--", "--scheduler-cls", "x.Y"), "sets --scheduler-cls itself"),
        ((*OURS, "--", "--kv-transfer-config", "{}"), "sets --kv-transfer-config itself"),
        ((*OURS, "--oldest-share", "2"), "--oldest-share must be at least 0, at most 1, got 2.0"),
        (("--alpha", "1"), "cannot use --alpha with fcfs, which accepts only --batch and --kv-host-memory"),
    ],
)
def test_a_scheduler_that_cannot_be_is_refused(arguments: tuple[str, ...], words: str, run: Run) -> None:
    said = run("serve", "no-such-model", *arguments, code=2).stderr
    assert words in " ".join(said.split())
