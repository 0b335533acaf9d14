"""By what words each model of a host is started, and by what names it is asked for.

Invariant: a name means one model. Adapters are named as vLLM names them: `--lora-modules NAME=PATH` or its JSON form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.launch import modes
from coldstart.launch.modes.template_runtime import TEMPLATE_RUNTIME

MODES = (modes.AUTO, *modes.repeatable_names())
FORKED = (modes.AUTO, TEMPLATE_RUNTIME.name)
"""Those in which a server may be forked from a runtime template."""
FAIL, WARN = "fail", "warn"


@dataclass(frozen=True)
class Launch:
    """What `coldstart serve` is told for the model `name`; `model` is an alias, a repository id or a directory.

    `on_miss` is "fail" or "warn" (vLLM's ordinary start where there is no bundle). With `engine_template` the host builds the
    model's engine once, forks its servers from that, and keeps it while its memory is not needed: the tier `template`.
    An `unlisted` model is not named in /v1/models. `weights_from` is where the weights come from on a machine that has none.
    """

    name: str
    model: str
    args: Arguments = field(default_factory=Arguments)
    aliases: tuple[str, ...] = ()
    mode: str = modes.AUTO
    on_miss: str = FAIL
    revision: str | None = None
    untrusted: bool = False
    engine_template: bool = False
    unlisted: bool = False
    weights_from: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(
                f"models.{self.name}: unknown mode {self.mode!r}", hint=f"one of {', '.join(MODES)}"
            )
        if self.on_miss not in (FAIL, WARN):
            raise UsageError(
                f"models.{self.name}: on_miss = {self.on_miss!r}", hint=f"write {FAIL} or {WARN}"
            )
        for flag in ("host", "port", "uds", "ssl_certfile", "ssl_keyfile"):
            if self.args.gives(flag):
                where = f"--{flag.replace('_', '-')}"
                raise UsageError(
                    f"models.{self.name}: {where} is the host's to choose", hint="coldstart host run --help"
                )

    @cached_property
    def served_names(self) -> tuple[str, ...]:
        """The names under which its server knows it, the first in its answers."""
        given = self.args.value("served_model_name", self.name)
        return tuple(map(str, given)) if isinstance(given, list) else (str(given),)

    @property
    def served(self) -> str:
        """The first of them."""
        return self.served_names[0]

    @cached_property
    def adapters(self) -> tuple[str, ...]:
        """Names of its LoRA adapters."""
        given = self.args.value("lora_modules", [])
        return tuple(_adapter(one) for one in (given if isinstance(given, list) else [given]))

    @property
    def same_server(self) -> tuple[object, ...]:
        """Equal where a running server would be started again just as it is."""
        words = (self.model, tuple(self.args), self.served_names)
        return (*words, self.revision, self.untrusted, self.engine_template)

    def names(self) -> Iterator[tuple[str, str]]:
        """(a name that it is asked for by, what its server calls that)."""
        yield from ((name, self.served) for name in (self.name, *self.served_names, *self.aliases))
        yield from ((name, name) for name in self.adapters)


def _adapter(given: object) -> str:
    return str(given.get("name", "")) if isinstance(given, dict) else str(given).partition("=")[0]


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes: the host's model, and the name that its server knows."""

    model: str
    served: str


class Catalogue:
    """All launches of a host, by name and by what is asked for. Raises UsageError where a name means two models."""

    def __init__(self, launches: Iterable[Launch]) -> None:
        self.launches: Mapping[str, Launch] = {launch.name: launch for launch in launches}
        self._routes: dict[str, Route] = {}
        for launch in self.launches.values():
            for name, served in launch.names():
                known = self._routes.setdefault(name, Route(launch.name, served))
                if known.model != launch.name:
                    raise UsageError(
                        f"{name!r} means {known.model} and {launch.name}", hint="give each its own aliases"
                    )

    def route(self, asked: str | None) -> Route | None:
        """Where a request for that name goes; one that names none goes to the only model, if there is one."""
        if asked is None and len(self.launches) == 1:
            (launch,) = self.launches.values()
            return Route(launch.name, launch.served)
        return self._routes.get(asked or "")
