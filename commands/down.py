"""Stop the servers and templates that `coldstart up` started from this store."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from coldstart.commands._completion import complete_model
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare

from coldstart.errors import CommandFailedError

if TYPE_CHECKING:
    from coldstart.launch.template_pool import RunningTemplate
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
        typer.Option(
            "--keep-template", help="Keep the templates running so that the next `coldstart up` is fast."
        ),
    ] = False,
) -> None:
    """Stop the servers of the model, then its templates. Bundles and frozen runtimes remain."""
    from coldstart.launch import template_pool

    servers = list(_stop_servers(common, model))
    templates, failures = ([], []) if keep_template else _stop_templates(common, model)
    template_pool.remove_unfinished()
    lines = [
        *map(_describe_stopped, servers),
        *(f"stopped the {template.level} template of {template.model}" for template in templates),
    ]
    data = {
        "servers": [
            {"model": record.argument, "url": record.url or record.planned_url, "pid": record.pid}
            for record in servers
        ],
        "templates": [
            {"model": template.model, "level": template.level, "pid": template.pid} for template in templates
        ],
    }
    common.out.print_result(
        data, "\n".join(lines) or f"no server or template of {model or 'any model'} is up"
    )
    if templates:
        common.out.print_note(
            "The next coldstart up prepares the template again; coldstart down --keep-template keeps it"
        )
    if failures:
        raise CommandFailedError(
            [str(line) for error in failures for line in error.lines], hint=failures[0].hint
        )


def _describe_stopped(record: "UpRecord") -> str:
    stopped = "the server" if record.url else "the start"
    url = record.url or record.planned_url or "an address that has not been chosen yet"
    return f"stopped {stopped} of {record.argument} at {url}"


def _stop_servers(common: Common, model: str | None) -> Iterator["UpRecord"]:
    from coldstart.launch import up_records

    names = None if model is None else up_records.list_possible_model_names(model)
    for directory in up_records.list_directories(common.cache):
        record = directory.read()
        last = record or directory.read_last()
        if names is not None and (last is None or names.isdisjoint((last.argument, last.path))):
            continue
        if record is not None:
            up_records.stop_supervisor(record)
            yield record
        directory.remove()


def _stop_templates(
    common: Common, model: str | None
) -> tuple[list["RunningTemplate"], list[CommandFailedError]]:
    from coldstart.launch import preparation, template_pool, up_records

    names = None if model is None else up_records.list_possible_model_names(model)
    stopped: list[RunningTemplate] = []
    failures: list[CommandFailedError] = []
    for template in preparation.list_prepared(common.cache):
        if names is not None and names.isdisjoint(template.owner):
            continue
        try:
            template_pool.stop_template(template)
        except CommandFailedError as error:
            failures.append(error)
        else:
            stopped += [template] if template.pid is not None else []
    return stopped, failures
