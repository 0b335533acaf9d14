"""The scrubber: hidden texts, readable texts, and coverage of vLLM's parser."""

import json
import re
from time import process_time

import pytest

from coldstart.system import secrets

SECRET_NAMES = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "VLLM_API_KEY",
    "OPENAI_API_KEY", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "DB_PASSWORD", "PGPASSWORD", "GITHUB_TOKEN",
    "COLDSTART_PREFETCH_TOKEN", "WANDB_API_KEY", "SLACK_WEBHOOK_URL", "JWT_SECRET", "SSH_PASSPHRASE", "AZURE_CLIENT_SECRET",
    "GOOGLE_CREDENTIALS", "SENTRY_DSN", "--api-key", "--hf-token", "--hf-tok", "--api-k", "s3_secret_access_key",
    "model_loader_extra_config.s3_secret_access_key", "AZURE_STORAGE_CONNECTION_STRING", "npm_config__authToken",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert secrets.is_secret_name(name)


@pytest.mark.parametrize(
    "argv",
    [
        ["--api-key", "S3CRET", "--port", "8000"],
        ["--api-key=S3CRET", "--port", "8000"],
        ["--api_key", "first", "S3CRET", "--port", "8000"],
        ["--hf-tok", "S3CRET", "--port", "8000"],
        ["--model-loader-extra-config", '{"s3": {"s3_secret_access_key": "S3CRET"}}', "--port", "8000"],
        ["--model-loader-extra-config.s3_secret_access_key", "S3CRET", "--port", "8000"],
        ["--model", "https://user:S3CRET@host/m?X-Amz-Signature=S3CRET&v=S3CRET", "--port", "8000"],
    ],
)
def test_scrub_hides_secrets_in_arguments(argv: list[str]) -> None:
    shown = secrets.redact_arguments(argv)
    assert "S3CRET" not in " ".join(shown) and secrets.HIDDEN in " ".join(shown)
    assert shown[-2:] == ["--port", "8000"]


def test_arguments_that_hold_none_are_left_alone() -> None:
    argv = ["--model", "/m/tiny", "--max-model-len", "1k", "-tp", "2", "-O3"]
    argv += ["--speculative-config", '{"n": 3}']
    assert secrets.redact_arguments(argv) == argv == secrets.drop_secret_options(argv)


def test_template_environment_contains_no_secret() -> None:
    argv = ["--api-key", "a", "b", "--seed", "-1", "--hf-token=c", "--max-model-len", "5", "-cc", '{"n":3}']
    hidden = [
        "--allowed-origins",
        "a",
        "https://user:S3CRET@host/",
        '--hf-overrides={"auth_token": "S3CRET"}',
    ]
    assert secrets.drop_secret_options([*argv, *hidden]) == ["--seed", "-1", *argv[6:]]


def test_scrub_hides_secrets_in_texts() -> None:
    environment = {"MY_TOKEN": "correct-horse", "SHORT_TOKEN": "abc", "KEY_FILE_TOKEN": "/run/secret"}
    environment["MY_TOKENIZER"] = "a/b-c"
    said = (
        "GET https://u:p4ss@h/x?sig=abc#f failed: correct-horse, Bearer abcdefghij, hf_abcdefghijklmnopqr, "
        "abc a/b-c /run/secret"
    )
    shown = secrets.redact_text(said, environment)
    assert shown == ("GET https://h/x?sig=*** failed: ***, Bearer ***, ***, abc a/b-c /run/secret")


def test_text_takes_no_time_when_a_line_is_long() -> None:
    began = process_time()
    assert secrets.redact_text("x" * 200_000 + "://user:S3CRET@host") == "x" * 200_000 + "://host"
    assert process_time() - began < 10


def test_scrub_hides_secrets_in_documents() -> None:
    document = {"env": {"HF_TOKEN": "x"}, "list": [{"password": "y"}], "n": 3, "token": None}
    shown = json.dumps(secrets.redact_document(document))
    assert shown == '{"env": {"HF_TOKEN": "***"}, "list": [{"password": "***"}], "n": 3, "token": null}'


def test_the_harmless_part_of_an_environment() -> None:
    harmless = {"OMP_NUM_THREADS": "2", "OTHER": "x"}
    hidden = {"VLLM_API_KEY": "abcdefgh", "VLLM_MEDIA": "https://u:p@h/", "A": "abcdefgh"}
    assert secrets.select_harmless(harmless | hidden, [*harmless, *hidden, "UNSET"]) == harmless


@pytest.mark.vllm
def test_every_secret_option_of_vllms_parser_is_known() -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from coldstart.vllm.engine.server import import_cli_args

    suspicious = re.compile(r"secret|passw|credential|(?:^|_)(?:key|token|auth)$")
    parser = import_cli_args().make_arg_parser(FlexibleArgumentParser())
    actions = [action for action in parser._actions if action.option_strings]
    assert len(actions) > 200
    found = {action.dest for action in actions if suspicious.search(action.dest)}
    cors = {"allow_credentials"}  # whether a browser may send its cookies: a flag
    assert found - cors == secrets.OPTIONS
    assert {action.dest for action in actions if secrets.is_secret_name(action.dest)} == secrets.OPTIONS
