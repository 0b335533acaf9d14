"""Launch specifications of a host's models, and the model names that requests can use.

Invariant: each name refers to one model. The names of LoRA adapters come from vLLM's option `--lora-modules`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.launch import modes
from coldstart.launch.modes import TEMPLATE_RUNTIME

MODES = (modes.AUTO, *(mode.name for mode in modes.LADDER if mode.is_repeatable))
FORKED = (modes.AUTO, TEMPLATE_RUNTIME.name)
"""Start modes in which a server can be forked from a runtime template."""
FAIL, WARN = "fail", "warn"


@dataclass(frozen=True)
class Launch:
    """Launch specification of the model `name`. `model` is an alias, a repository ID or a directory.

    `on_miss` is "fail", or "warn" to start stock vLLM if no bundle matches. An `unlisted` model does not appear in
    /v1/models. `weights_from` is the source from which a machine without the weights fetches them. `devices` are the
    indices of the GPUs that the server may use. If `devices` is empty, it may use all GPUs. It may use `gpu_bytes` bytes of
    each GPU; 0 sets no limit. With `defer_capture`, it captures most CUDA graphs after it is ready.
    """

    name: str
    model: str
    args: Arguments = field(default_factory=Arguments)
    aliases: tuple[str, ...] = ()
    mode: str = modes.AUTO
    on_miss: str = FAIL
    revision: str | None = None
    untrusted: bool = False
    unlisted: bool = False
    weights_from: str | None = None
    devices: tuple[int, ...] = ()
    defer_capture: bool = False
    gpu_bytes: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(
                f"models.{self.name}: unknown mode {self.mode!r}", hint=f"use one of: {', '.join(MODES)}"
            )
        if self.on_miss not in (FAIL, WARN):
            raise UsageError(
                f"models.{self.name}: invalid on_miss {self.on_miss!r}", hint=f"use {FAIL} or {WARN}"
            )
        if min(self.devices, default=0) < 0 or len(set(self.devices)) < len(self.devices):
            raise UsageError(
                f"models.{self.name}.devices: expected distinct GPU indices (0 or greater), found {list(self.devices)}",
                hint="use a list such as devices = [0, 1]",
            )
        for flag in ("host", "port", "uds", "ssl_certfile", "ssl_keyfile"):
            if self.args.contains_flag(flag):
                where = f"--{flag.replace('_', '-')}"
                raise UsageError(
                    f"models.{self.name}: args must not contain {where}, which the host sets",
                    hint=f"remove {where} from args",
                )

    @cached_property
    def served_names(self) -> tuple[str, ...]:
        """Return the model names that the server accepts (`--served-model-name`). Its responses contain the first name."""
        given = self.args.get_value("served_model_name", self.name)
        return tuple(map(str, given)) if isinstance(given, list) else (str(given),)

    @property
    def served_name(self) -> str:
        """Return the first served model name."""
        return self.served_names[0]

    @cached_property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the model's LoRA adapters."""
        given = self.args.get_value("lora_modules", [])
        return tuple(_adapter_name(one) for one in (given if isinstance(given, list) else [given]))

    @property
    def server_identity(self) -> tuple[object, ...]:
        """Return a value that is equal for two launches if they would start identical servers."""
        arguments = (self.model, tuple(self.args), self.served_names)
        return (*arguments, self.revision, self.untrusted, self.devices, self.defer_capture, self.gpu_bytes)

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield each model name that requests may use, together with the name that the server expects."""
        yield from ((name, self.served_name) for name in (self.name, *self.served_names, *self.aliases))
        yield from ((name, name) for name in self.adapters)


def _adapter_name(given: object) -> str:
    return str(given.get("name", "")) if isinstance(given, dict) else str(given).partition("=")[0]


@dataclass(frozen=True, slots=True)
class Destination:
    """Destination of a request: the model, and the model name that its server expects."""

    model: str
    served_name: str


class Catalogue:
    """Launch specifications of a host by model, with a lookup by requested model name.

    Raises UsageError if a name refers to two models, or if the default model is unknown.
    """

    def __init__(self, launches: Iterable[Launch], default: str | None = None) -> None:
        self.launches: Mapping[str, Launch] = {launch.name: launch for launch in launches}
        self._routes: dict[str, Destination] = {}
        if default is not None and default not in self.launches:
            raise UsageError(
                f"default_model: unknown model {default!r}",
                hint=f"use one of: {', '.join(self.launches)}",
            )
        self._default = default
        for launch in self.launches.values():
            for name, served in launch.names():
                known = self._routes.setdefault(name, Destination(launch.name, served))
                if known.model != launch.name:
                    raise UsageError(
                        f"the model name {name!r} refers to two models, {known.model} and {launch.name}",
                        hint="give each model unique aliases",
                    )

    def find_destination(self, requested_name: str | None) -> Destination | None:
        """Return the destination of a request for the model `requested_name`, or None if the name is unknown.

        Without a name, or with an empty one, a request goes to the default model, or to the host's only model.
        """
        only = next(iter(self.launches)) if len(self.launches) == 1 else ""
        return self._routes.get(requested_name or self._default or only)
