"""Show a bundle, the key of a model on this machine, or why no bundle matches that key.

REF is a bundle (NAME, NAME:vN, NAME@sha256:..., or a digest prefix) or a model. Arguments after -- go to vLLM and are
part of a model's key.
"""

from typing import Annotated

import typer
from coldstart.artifacts.bundle import anyone
from coldstart.commands import _bundle_views
from coldstart.commands._bundle_views import BundleView
from coldstart.commands._completion import complete_model
from coldstart.commands._options import Common, Revision
from coldstart.commands._options import command as declare

from coldstart.errors import UsageError
from coldstart.models import inspection, resolver


@declare(takes_vllm_args=True)
def command(
    common: Common,
    ref: Annotated[
        str,
        typer.Argument(metavar="MODEL|REF", help="Model or bundle reference.", autocompletion=complete_model),
    ],
    tree: Annotated[bool, typer.Option("--tree", help="List the files of each section.")] = False,
    key: Annotated[bool, typer.Option("--key", help="Print the fields of the bundle key.")] = False,
    diff: Annotated[
        str | None,
        typer.Option("--diff", metavar="REF2", help="Reference of another bundle to compare with."),
    ] = None,
    revision: Revision = None,
) -> None:
    """Select the view and print it."""
    if sum((tree, key, diff is not None)) > 1:
        raise UsageError("--tree, --key and --diff exclude each other")
    given = common.vllm_args
    if key and (given or revision or inspection.names_model(ref)):
        lookup = common.look_up(ref, revision)
        if lookup.bundle is None:  # The bundle is only displayed, so it need not be trusted.
            lookup = common.look_up(ref, revision, anyone)
        return _show(common, _bundle_views.view_key(lookup.key, lookup))
    bundle = resolver.find_bundle(
        ref, given, cache=common.cache, offline=common.offline, revision=revision, asks_hub=True
    )
    if not given and revision is None:
        common.note_version(ref, bundle.ref)
    if key:
        return _show(common, _bundle_views.view_key(bundle.key))
    if tree:
        return _show(common, _bundle_views.view_files(bundle))
    if diff is not None:
        return _show(common, _bundle_views.view_difference(bundle, common.get_bundle(diff)))
    return _show(common, _bundle_views.view_bundle(bundle))


def _show(common: Common, view: BundleView) -> None:
    common.out.result(view.data, view.text, brief=view.brief)
