"""Recognise the variables that Kubernetes injects into a pod for each service of its namespace. Standard library only.

A service NAME gives NAME_SERVICE_HOST, NAME_SERVICE_PORT, NAME_SERVICE_PORT_<port name>, NAME_PORT and NAME_PORT_<n>_<protocol>
with their parts. They configure no program, but a service can have the name of one: a service `vllm` sets VLLM_PORT.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping

# The patterns are text, which `re` compiles at the first use: few environments have a name that one must match.
_ADDRESS = r"(?i:tcp|udp|sctp)://\S+"
_NUMBER = r"\d{1,5}"
_HOST = r"[0-9A-Fa-f:.]+"
_PROTOCOL = r"(?i:tcp|udp|sctp)"
# The end of the name, and the form of the value. NAME_PORT alone is also an ordinary name: its value decides.
_FORMS = (
    (r"\w+_SERVICE_HOST", _HOST),
    (r"\w+_SERVICE_PORT(?:_\w+)?", _NUMBER),
    (r"\w+_PORT(?:_\d+_(?:TCP|UDP|SCTP))?", _ADDRESS),
    (r"\w+_PORT_\d+_(?:TCP|UDP|SCTP)_PROTO", _PROTOCOL),
    (r"\w+_PORT_\d+_(?:TCP|UDP|SCTP)_PORT", _NUMBER),
    (r"\w+_PORT_\d+_(?:TCP|UDP|SCTP)_ADDR", _HOST),
)


def is_injected(name: str, value: str) -> bool:
    """Return whether a variable of this name and value is one that Kubernetes injects for a service."""
    return any(re.fullmatch(names, name) and re.fullmatch(form, value) for names, form in _FORMS)


def drop_injected(environment: MutableMapping[str, str], prefix: str) -> list[str]:
    """Remove the injected variables whose names begin with `prefix`, and return their names."""
    dropped = [
        name
        for name, value in sorted(environment.items())
        if name.startswith(prefix) and is_injected(name, value)
    ]
    for name in dropped:
        del environment[name]
    return dropped
