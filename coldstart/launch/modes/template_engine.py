"""Start mode `template-engine`: a process with a built engine forks the server. Only CPU engines can be forked."""

from __future__ import annotations

from coldstart.contract.template_levels import ENGINE
from coldstart.launch.modes.from_template import TemplateMode
from coldstart.launch.modes.mode import Reason

TEMPLATE_ENGINE = TemplateMode(
    "template-engine",
    (ENGINE,),
    loads_weights=False,
    on_gpu=Reason(
        "a built GPU engine cannot be forked: CUDA does not survive a fork",
        "coldstart template start MODEL --level runtime, which forks before CUDA is initialised",
    ),
)
