"""Merge of several Prometheus expositions into one, each with a label that names its model.

prometheus_client's parser reads each character in Python: one server's metrics took half a second of processor time
that streams of tokens need. This module checks and relabels whole lines by a regular expression instead.

Invariant: the result is valid if the texts are. A family has one HELP and TYPE, and its samples stand together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\.)*"'
_VALUE = r"[+-]?(?:[0-9][0-9.]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+|Inf|NaN)"
_SAMPLE = re.compile(rf"({_NAME})(?:\{{((?:{_LABEL}(?:,|(?=\}})))*)\}})?[ \t]+({_VALUE}(?:[ \t]+-?[0-9]+)?)")
_HELP = re.compile(rf"# HELP ({_NAME})(?: (.*))?")
_TYPE = re.compile(rf"# TYPE ({_NAME}) (counter|gauge|histogram|summary|untyped)")
_EACH_LABEL = re.compile(_LABEL)
_SUFFIXES = ("", "_bucket", "_count", "_sum")


@dataclass(slots=True)
class _Family:
    kind: str = "untyped"
    help: str = ""
    samples: list[str] = field(default_factory=list)


def merge(own: str, servers: Iterable[tuple[str, str]]) -> tuple[str, list[str]]:
    """Merge expositions.

    Args:
        own: Exposition that receives no further label.
        servers: Pairs of a model's name and its server's exposition.

    Returns:
        The merged text, and the names of models whose text is invalid or contradicts an earlier one. Those are left out.
    """
    families = _parse(own, None)
    omitted = []
    for model, text in servers:
        try:
            _add(families, _parse(text, model))
        except ValueError:
            omitted.append(model)
    return "".join(_format(name, family) for name, family in families.items()), omitted


def escape(value: str) -> str:
    """Return `value` as the content of a quoted label value."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _parse(text: str, model: str | None) -> dict[str, _Family]:
    """Return the families of a text by name. Raises ValueError for an invalid line."""
    families: dict[str, _Family] = {}
    label = "" if model is None else f'model="{escape(model)}"'
    members: set[str] = set()
    family = _Family()
    for line in text.split("\n"):
        if (found := _SAMPLE.fullmatch(line)) is not None:
            name, labels, value = found.groups()
            if name not in members:
                members, family = {name}, families.setdefault(name, _Family())
            family.samples.append(_relabel(name, labels or "", value, label))
        elif (about := _HELP.fullmatch(line) or _TYPE.fullmatch(line)) is not None:
            name, value = about.groups()
            family = families.setdefault(name, _Family())
            members = {name + suffix for suffix in _SUFFIXES}
            if about.re is _HELP:
                family.help = value or ""
            else:
                family.kind = value
        elif line.strip() and (not line.startswith("#") or line.startswith("# TYPE ")):
            raise ValueError(f"invalid line {line[:80]!r}")
    return families


def _relabel(name: str, labels: str, value: str, label: str) -> str:
    if label and "model=" in labels:
        # Prometheus itself renames a label of the target that collides with its own.
        given = (one.group() for one in _EACH_LABEL.finditer(labels))
        labels = ",".join("exported_" + one if one.startswith("model=") else one for one in given)
    joined = ",".join(part for part in (label, labels.rstrip(",")) if part)
    return f"{name}{{{joined}}} {value}\n" if joined else f"{name} {value}\n"


def _add(families: dict[str, _Family], more: dict[str, _Family]) -> None:
    """Append the samples of another text. Raises ValueError, and changes nothing, if a family has another type."""
    for name, family in more.items():
        if name in families and families[name].kind != family.kind:
            raise ValueError(f"{name} is a {families[name].kind} and a {family.kind}")
    for name, family in more.items():
        families.setdefault(name, _Family(family.kind, family.help)).samples += family.samples


def _format(name: str, family: _Family) -> str:
    about = f"# HELP {name} {family.help}\n" if family.help else ""
    return f"{about}# TYPE {name} {family.kind}\n" + "".join(family.samples)
