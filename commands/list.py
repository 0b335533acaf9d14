"""List the bundles in the store, in order of publication."""

from coldstart.artifacts.bundle import Bundle
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._output import human_bytes, table


@declare()
def command(common: Common) -> None:
    """One row per bundle; with -q one reference per line."""
    store = common.store()
    bundles = store.list()
    data = {"store": str(store.root), "bundles": [_data(bundle) for bundle in bundles]}
    common.out.result(data, lambda: _text(bundles), brief="\n".join(bundle.ref for bundle in bundles))
    if not bundles:
        common.out.note(f"No bundle in {store.root}. Next: coldstart materialize tiny-llama")


def _data(bundle: Bundle) -> dict[str, object]:
    return {
        "name": bundle.name,
        "version": bundle.version,
        "digest": bundle.digest,
        "key": bundle.key_digest,
        "size": bundle.size,
        "created": bundle.manifest.provenance.created,
    }


def _text(bundles: list[Bundle]) -> str:
    rows = [
        (
            f"{bundle.name}:v{bundle.version}",
            bundle.key_digest.removeprefix("sha256:")[:12],
            human_bytes(bundle.size),
            bundle.manifest.provenance.created,
            bundle.digest.removeprefix("sha256:")[:12],
        )
        for bundle in bundles
    ]
    return table(("bundle", "key", "size", "created", "digest"), rows)
