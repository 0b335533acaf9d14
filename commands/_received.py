"""What import and pull say: the bundles, and whether their code may run here."""

from collections.abc import Sequence

from coldstart.artifacts import selection
from coldstart.artifacts.bundle import Bundle
from coldstart.commands._options import Common

from coldstart.errors import CommandFailedError
from coldstart.models import inspection


def report(common: Common, bundles: Sequence[Bundle], outcome: str) -> None:
    """Render the references; warn for each bundle whose signer nobody trusts. Raises CommandFailedError for none."""
    if not bundles:
        raise CommandFailedError(
            "There is no bundle in it.",
            hint="name an archive that was exported, or an address that was pushed to",
        )
    judged = [inspection.trust(bundle) for bundle in bundles]
    data = [
        {"ref": bundle.ref, "version": bundle.version, "trusted": result.ok, "signer": result.signer}
        for bundle, result in zip(bundles, judged, strict=True)
    ]
    common.out.result({"bundles": data}, "\n".join(bundle.ref for bundle in bundles))
    for bundle, result in zip(bundles, judged, strict=True):
        if not result.ok:
            common.out.warn(
                f"code in {bundle.name}:v{bundle.version} will not run: {result.reason}; to trust its maker: "
                "coldstart trust add FILE"
            )
        elif newer := selection.newer_than(bundle, common.store().list(), inspection.trust):
            common.out.warn(
                f"{bundle.name}:v{bundle.version} is older than v{newer[0].version}, which stays the one that is taken; "
                f"to go back: coldstart prune {newer[0].ref}"
            )
    common.out.success(outcome, where=str(common.store().root), then=f"coldstart serve {bundles[0].name}")
