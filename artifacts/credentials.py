"""Registry credentials that `docker login` stored in config.json or in a credential helper.

Helper protocol: `docker-credential-NAME get` reads the registry from stdin and prints {"Username", "Secret"} as JSON. The
user name <token> marks an identity token. https://github.com/docker/docker-credential-helpers
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coldstart.artifacts import canonical
from coldstart.artifacts.errors import RemoteDeniedError, describe_reason

# Docker stores Docker Hub logins under a different host name than that of the registry.
HUB_KEY, HUB_HOSTS = (
    "https://index.docker.io/v1/",
    frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"}),
)
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TOKEN_USER = "<token>"
_NOT_FOUND = "credentials not found"
_HELPER_S = 60.0


@dataclass(frozen=True, slots=True)
class Login:
    """Stored registry login: a user name and password, or an identity token for the registry's token server."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def basic_authorization(self) -> str | None:
        """Return the value of the Authorization header, or None for an identity token."""
        if self.identity_token:
            return None
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def find_login(host: str, environment: Mapping[str, str] = os.environ) -> Login | None:
    """Return the stored login for HOST[:PORT], or None. Raises RemoteDeniedError if a credential helper fails."""
    config = _read_docker_config(environment)
    key = HUB_KEY if host in HUB_HOSTS else host
    helper = _get_object(config, "credHelpers").get(key) or config.get("credsStore")
    if isinstance(helper, str) and _HELPER.fullmatch(helper) and (login := _run_helper(helper, key)):
        return login
    for name, entry in _get_object(config, "auths").items():
        if (
            isinstance(entry, dict)
            and key in (name, name.rpartition("://")[2].partition("/")[0])
            and (login := _parse_auth_entry(entry))
        ):
            return login
    return None


def _read_docker_config(environment: Mapping[str, str]) -> Mapping[str, Any]:
    directory = environment.get("DOCKER_CONFIG")
    # Unlike Path.home, expanduser does not fail for a user without a home directory.
    path = Path(directory or os.path.expanduser("~/.docker"), "config.json")  # noqa: PTH111
    try:
        document = canonical.read_json(path)
    except (OSError, ValueError):
        return {}  # Without a login, the registry decides whether it allows anonymous access.
    return document if isinstance(document, dict) else {}


def _get_object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    member = config.get(name)
    return member if isinstance(member, dict) else {}


def _run_helper(helper: str, key: str) -> Login | None:
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run(
            [program, "get"], input=key.encode(), capture_output=True, timeout=_HELPER_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RemoteDeniedError(
            f"cannot run {program}: {describe_reason(error)}", hint=f"run `{program} get` to find the cause"
        ) from error
    if done.returncode:
        output = (done.stdout or done.stderr).decode(errors="replace").strip()[:200]
        if _NOT_FOUND in output:
            return None
        raise RemoteDeniedError(
            f"{program} failed: {output}",
            hint=f"unlock the credential store of {program}, or run `docker login {key}`",
        )
    try:
        document = canonical.parse_json(done.stdout, source=program)
        user, secret = str(document["Username"]), str(document["Secret"])
    except (ValueError, TypeError, KeyError) as error:
        raise RemoteDeniedError(f"{program} returned no credentials") from error
    return Login(identity_token=secret) if user == _TOKEN_USER else Login(user, secret)


def _parse_auth_entry(entry: Mapping[str, Any]) -> Login | None:
    if isinstance(token := entry.get("identitytoken"), str) and token:
        return Login(identity_token=token)
    try:
        user, mark, password = base64.b64decode(entry.get("auth", ""), validate=True).decode().partition(":")
    except (TypeError, ValueError):
        return None
    return Login(user, password.rstrip("\0")) if mark else None
