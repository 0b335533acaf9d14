"""Start mode `standby`: an engine that sleeps on its GPU wakes up as the server. Each engine is one server."""

from __future__ import annotations

from coldstart.contract.template_levels import SLEEP_LEVELS
from coldstart.launch.modes.from_template import TemplateMode
from coldstart.launch.modes.mode import Reason

STANDBY = TemplateMode(
    "standby",
    tuple(SLEEP_LEVELS),
    loads_weights=False,
    on_cpu=Reason(
        "vLLM's sleep mode works on devices only: the CPU build would free no memory",
        "use the mode template-engine: coldstart template start MODEL --level engine",
    ),
    repeatable=False,
    probes=(),
)
