"""Stop the servers and templates that `coldstart up` started."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from coldstart.commands._completion import complete_model
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare

from coldstart.errors import CommandFailedError

if TYPE_CHECKING:
    from coldstart.launch.template_pool import Warm
    from coldstart.launch.up_records import UpRecord


@declare()
def command(
    common: Common,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="Model to stop; default: all models.", autocompletion=complete_model
        ),
    ] = None,
    keep_template: Annotated[
        bool,
        typer.Option("--keep-template", help="Keep the prepared start mode for a fast next coldstart up."),
    ] = False,
) -> None:
    """Stop the servers of the model, then its templates. Bundles and frozen runtimes remain."""
    servers = list(_stop_servers(model))
    templates, failures = ([], []) if keep_template else _stop_templates(model)
    stopped = [
        *(f"stopped the server of {one.argument}" + (f" at {one.url}" if one.url else "") for one in servers),
        *(f"stopped the {one.level} template of {one.model}" for one in templates),
    ]
    data = {
        "servers": [{"model": one.argument, "url": one.url, "pid": one.pid} for one in servers],
        "templates": [{"model": one.model, "level": one.level, "pid": one.pid} for one in templates],
    }
    common.out.result(data, "\n".join(stopped) or f"nothing of {model or 'any model'} is up")
    if templates:
        common.out.note(
            "The next coldstart up prepares the template again; coldstart down --keep-template keeps it"
        )
    if failures:
        raise CommandFailedError(
            [str(line) for error in failures for line in error.lines], hint=failures[0].hint
        )


def _stop_servers(model: str | None) -> Iterator["UpRecord"]:
    from coldstart.launch import up_records

    wanted = None if model is None else up_records.list_names(model)
    for directory in up_records.list_directories():
        record = directory.read()
        if record is not None and wanted is not None and wanted.isdisjoint((record.argument, record.path)):
            continue
        if record is not None:
            up_records.stop(record)
            yield record
        directory.remove()


def _stop_templates(model: str | None) -> tuple[list["Warm"], list[CommandFailedError]]:
    from coldstart.launch import preparation, template_pool, up_records

    wanted = None if model is None else up_records.list_names(model)
    stopped: list[Warm] = []
    failures: list[CommandFailedError] = []
    for warm, owner in preparation.list_prepared():
        if wanted is not None and wanted.isdisjoint(owner):
            continue
        try:
            template_pool.stop(warm)
        except CommandFailedError as error:
            failures.append(error)
        else:
            stopped += [warm] if warm.pid is not None else []
    return stopped, failures
