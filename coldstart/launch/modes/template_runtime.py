"""Start mode `template-runtime`: a process with vLLM imported forks the server, which loads its own weights."""

from __future__ import annotations

from coldstart.contract.template_levels import RUNTIME
from coldstart.launch.modes.from_template import TemplateMode

TEMPLATE_RUNTIME = TemplateMode("template-runtime", (RUNTIME,), loads_weights=True)
