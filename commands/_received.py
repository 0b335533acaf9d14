"""Report of import and pull: the bundles, and whether their code may run here."""

from collections.abc import Sequence

from coldstart.artifacts import selection
from coldstart.artifacts.bundle import Bundle
from coldstart.commands._options import Common
from coldstart.commands._output import count

from coldstart.errors import ColdstartError, CommandFailedError
from coldstart.models import inspection, resolution
from coldstart.validate import against


def report(common: Common, bundles: Sequence[Bundle], outcome: str) -> None:
    """Print the references, and warn for each bundle without a trusted signature.

    Raises CommandFailedError for an empty list.
    """
    if not bundles:
        raise CommandFailedError(
            "the source contains no bundle",
            hint="specify an exported archive, or the address of a pushed bundle",
        )
    judged = [inspection.trust(bundle) for bundle in bundles]
    data = [
        {
            "ref": bundle.ref,
            "version": bundle.version,
            "trusted": result.ok,
            "signer": result.signer,
            "replaced_blobs": bundle.replaced,
        }
        for bundle, result in zip(bundles, judged, strict=True)
    ]
    common.out.result({"bundles": data}, "\n".join(bundle.ref for bundle in bundles))
    for bundle, result in zip(bundles, judged, strict=True):
        if bundle.replaced:
            common.out.note(
                f"{bundle.name}:v{bundle.version}: {count(bundle.replaced, 'damaged blob')} replaced"
            )
        if not result.ok:
            common.out.warn(
                f"code in {bundle.name}:v{bundle.version} will not run: {result.reason}; to trust its signer: "
                "coldstart trust add FILE"
            )
        elif newer := selection.newer_than(bundle, common.store().list(), inspection.trust):
            common.out.warn(
                f"{bundle.name}:v{bundle.version} is older than v{newer[0].version}, which is still selected; "
                f"to go back: coldstart prune {newer[0].ref}"
            )
    common.out.success(outcome, where=str(common.store().root), then=_next_command(bundles[0]))


def _next_command(bundle: Bundle) -> str:
    """Return the command that starts a server from the bundle here, or else the one that shows the bundle."""
    try:
        can_serve = (
            (inspection.names_model(bundle.name) or resolution.is_repo_id(bundle.name))
            and inspection.read_arguments(bundle) is not None
            and not against.compare(bundle.key.fields, against.host(), bundle.name)
        )
    except ColdstartError:  # vLLM is not installed, or the bundle cannot be read
        can_serve = False
    return f"coldstart {'serve' if can_serve else 'inspect'} {bundle.name}:v{bundle.version}"
