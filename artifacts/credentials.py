"""Credentials that `docker login` stored for a registry, in config.json or with a credential helper.

The helper protocol: `docker-credential-NAME get`, the registry on stdin, {"Username", "Secret"} as JSON on stdout;
the user name <token> marks an identity token. https://github.com/docker/docker-credential-helpers
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
from coldstart.artifacts.errors import RemoteDeniedError

# Docker's logins are stored under another host than its registry's.
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
    """User with a password, or an identity token for the registry's token server."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity: str = field(default="", repr=False)

    @property
    def basic(self) -> str | None:
        """Return the value of an Authorization header, None for an identity token."""
        if self.identity:
            return None
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def stored(host: str, environment: Mapping[str, str] = os.environ) -> Login | None:
    """Return the login for HOST[:PORT], or None. Raises RemoteDeniedError if a helper fails."""
    config = _config(environment)
    key = HUB_KEY if host in HUB_HOSTS else host
    helper = _members(config, "credHelpers").get(key) or config.get("credsStore")
    if isinstance(helper, str) and _HELPER.fullmatch(helper) and (login := _from_helper(helper, key)):
        return login
    for name, entry in _members(config, "auths").items():
        if isinstance(entry, dict) and key in (name, _host(name)) and (login := _entry(entry)):
            return login
    return None


def _config(environment: Mapping[str, str]) -> Mapping[str, Any]:
    directory = environment.get("DOCKER_CONFIG")
    # Unlike Path.home, expanduser does not fail for a user without a home directory.
    path = Path(directory or os.path.expanduser("~/.docker"), "config.json")  # noqa: PTH111
    try:
        document = canonical.read(path)
    except (OSError, ValueError):
        return {}  # No stored login; the registry decides whether it serves anonymous readers.
    return document if isinstance(document, dict) else {}


def _members(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    member = config.get(name)
    return member if isinstance(member, dict) else {}


def _from_helper(helper: str, key: str) -> Login | None:
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run(
            [program, "get"], input=key.encode(), capture_output=True, timeout=_HELPER_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RemoteDeniedError(
            f"{program} cannot be run: {type(error).__name__}", hint=f"run {program} get"
        ) from error
    if done.returncode:
        output = (done.stdout or done.stderr).decode(errors="replace").strip()[:200]
        if _NOT_FOUND in output:
            return None
        raise RemoteDeniedError(
            f"{program} failed: {output}",
            hint=f"unlock the credential store of {program}, or docker login {key}",
        )
    try:
        document = canonical.parse(done.stdout, what=program)
        user, secret = str(document["Username"]), str(document["Secret"])
    except (ValueError, TypeError, KeyError) as error:
        raise RemoteDeniedError(f"{program} returned no credentials") from error
    return Login(identity=secret) if user == _TOKEN_USER else Login(user, secret)


def _entry(entry: Mapping[str, Any]) -> Login | None:
    if isinstance(token := entry.get("identitytoken"), str) and token:
        return Login(identity=token)
    try:
        user, mark, password = base64.b64decode(entry.get("auth", ""), validate=True).decode().partition(":")
    except (TypeError, ValueError):
        return None
    return Login(user, password.rstrip("\0")) if mark else None


def _host(name: str) -> str:
    return name.partition("://")[2].partition("/")[0] if "://" in name else name.partition("/")[0]
