"""Show a bundle, the key of a model on this machine, or why no bundle matches that key.

REF is a bundle (NAME, NAME:vN, NAME@sha256:..., or a digest prefix) or a model. Arguments after -- go to vLLM and are
part of a model's key.
"""

from typing import Annotated

import typer
from coldstart.artifacts.bundle import Bundle, anyone
from coldstart.commands import _bundle_views
from coldstart.commands._bundle_views import BundleView
from coldstart.commands._completion import complete_model
from coldstart.commands._export import Exports, give
from coldstart.commands._options import Common, Revision
from coldstart.commands._options import command as declare
from coldstart.commands._output import public

from coldstart.bench.report.report import Report
from coldstart.errors import UsageError
from coldstart.models import inspection, resolver


@declare(takes_vllm_args=True, exports=True)
def command(
    common: Common,
    exports: Exports,
    ref: Annotated[
        str,
        typer.Argument(metavar="MODEL|REF", help="Model or bundle reference.", autocompletion=complete_model),
    ],
    manifest: Annotated[bool, typer.Option("--manifest", help="Print the manifest as it is stored.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="List the files of each section.")] = False,
    key: Annotated[bool, typer.Option("--key", help="Print the fields of the bundle key.")] = False,
    diff: Annotated[
        str | None,
        typer.Option("--diff", metavar="REF2", help="Reference of another bundle to compare with."),
    ] = None,
    revision: Revision = None,
) -> None:
    """Select the view and print it."""
    if sum((manifest, tree, key, diff is not None)) > 1:
        raise UsageError("--manifest, --tree, --key and --diff exclude each other")
    given = common.vllm_args
    if key and (given or revision or inspection.names_model(ref)):
        lookup = common.look_up(ref, revision)
        if lookup.bundle is None:  # The bundle is only displayed, so it need not be trusted.
            lookup = common.look_up(ref, revision, anyone)
        return _show(common, exports, _bundle_views.view_key(lookup.key, lookup))
    bundle = resolver.find_bundle(
        ref, given, cache=common.cache, offline=common.offline, revision=revision, asks_hub=True
    )
    if not given and revision is None:
        common.note_version(ref, bundle.ref)
    if key:
        return _show(common, exports, _bundle_views.view_key(bundle.key))
    return _show(common, exports, _view(common, bundle, manifest=manifest, tree=tree, diff=diff))


def _view(common: Common, bundle: Bundle, *, manifest: bool, tree: bool, diff: str | None) -> BundleView:
    if manifest:
        return _bundle_views.view_manifest(bundle)
    if tree:
        return _bundle_views.view_files(bundle)
    if diff is not None:
        other = common.get_bundle(diff)
        return _bundle_views.view_difference(bundle, other)
    return _bundle_views.view_bundle(bundle)


def _show(common: Common, exports: Exports, view: BundleView) -> None:
    rows = public({"rows": view.rows})["rows"]
    report = Report(view.title, public(view.data), view.columns, lambda: rows)
    give(common.out, exports, report, view.text, brief=view.brief)
