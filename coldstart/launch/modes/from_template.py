"""Start modes that use a running template: the template forks the server, or wakes up as the server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coldstart.contract.template_levels import RUNTIME
from coldstart.errors import UsageError
from coldstart.launch.modes.mode import LaunchRefusedError, Reason, await_ready
from coldstart.system import runtime

if TYPE_CHECKING:
    from coldstart.launch.request import ServerStart
    from coldstart.launch.server_process import Running
    from coldstart.launch.template_pool import Warm


@dataclass(frozen=True)
class TemplateMode:
    """A mode whose server comes from a template of one of `levels`.

    `on_cpu` and `on_gpu` are the reasons why vLLM's CPU build, or its GPU build, has no such template.
    """

    name: str
    levels: tuple[str, ...]
    loads_weights: bool
    on_cpu: Reason | None = None
    on_gpu: Reason | None = None
    repeatable: bool = True
    probes: tuple[str, ...] = ("template",)

    def unavailable(self, start: ServerStart | None = None) -> Reason | None:
        """Return the reason as specified by StartMode. A template that is not ready counts as available."""
        here = self.on_cpu if runtime.targets_cpu() else self.on_gpu
        if here is not None or start is None or self._templates(start):
            return here
        model = start.request.lookup.model.name
        reason = f"no {self.name} runs for {model}"
        if any(warm.model == model and warm.level in self.levels for warm in _listed(start)):
            reason = f"the {self.name} that runs for {model} was started with other arguments or versions"
        return Reason(reason, start.request.lookup.format_template(self.levels[0]))

    def launch(self, start: ServerStart) -> Running:
        """Fork or wake the server, as specified by StartMode."""
        from coldstart.launch import server_process, template_pool

        warm = self._ready(start)

        def judge() -> None:
            if (reason := template_pool.obstacle(warm, start.plan)) is not None:
                raise LaunchRefusedError(reason, "run coldstart template stop, then start the template again")

        try:
            launched = server_process.forked(start.plan, warm.socket, judge=judge)
        except server_process.TemplateHungError as error:
            template_pool.discard(warm)
            raise LaunchRefusedError(str(error), "coldstart template status") from error
        return await_ready(start, launched)

    def _ready(self, start: ServerStart) -> Warm:
        found = self._templates(start)
        for warm in found:
            if warm.ready:
                return warm
        if not found:
            raise LaunchRefusedError(f"the {self.name} has exited", "coldstart template status")
        if found[0].pid:
            raise LaunchRefusedError(f"the {self.name} of {found[0].model} is not ready yet")
        raise LaunchRefusedError(f"the {self.name} of {found[0].model} has died", "coldstart template stop")

    def _templates(self, start: ServerStart) -> list[Warm]:
        """Return the templates that fit this start, ready or not, in the order of `levels`."""
        try:
            fitting = [warm for warm in _listed(start) if _fits(warm, start)]
        except (OSError, UsageError) as error:  # no private directory for sockets, or no space in it
            raise LaunchRefusedError(str(error)) from error
        return [warm for level in self.levels for warm in fitting if warm.level == level]


def _listed(start: ServerStart) -> Iterator[Warm]:
    from coldstart.launch import template_pool

    for root in dict.fromkeys((start.request.templates, None)):
        yield from template_pool.listed(root)


def _fits(warm: Warm, start: ServerStart) -> bool:
    same_key = warm.level == RUNTIME or warm.key == start.request.lookup.key.digest
    return same_key and warm.python == sys.executable
