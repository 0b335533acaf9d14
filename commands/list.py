"""List the bundles in the store, in order of publication."""

import shlex

from coldstart.artifacts import oci
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._output import human_bytes, table

from coldstart.system.trust import trust_cache


@declare()
def command(common: Common) -> None:
    """Print one row per bundle, or with -q one reference per line."""
    store = common.store()
    bundles = store.list()
    listed = [_data(bundle) for bundle in bundles]
    brief = "\n".join(f"{data['name']}@{data['digest']}" for data in listed if data["name"])
    common.out.result({"store": str(store.root), "bundles": listed}, lambda: _text(listed), brief=brief)
    if not bundles:
        common.out.note(f"No bundle in {store.root}. Next: coldstart materialize tiny-llama")


def _data(bundle: Bundle) -> dict[str, object]:
    known: dict[str, object] = {
        "version": bundle.version,
        "digest": bundle.digest,
    }
    try:
        return {
            "name": bundle.name,
            **known,
            "trusted": _is_trusted(bundle),
            "key": bundle.key_digest,
            "size": bundle.size,
            "created": bundle.manifest.provenance.created,
            "arguments": list(bundle.manifest.provenance.arguments),
        }
    except (
        BundleError
    ) as error:  # A damaged bundle, or one of a newer release, does not prevent listing the others.
        annotations = bundle.descriptor.annotations
        problem = f"{error.message} [{error.code}]"
        return {
            "name": annotations.get(oci.NAME),
            **known,
            "trusted": False,
            "key": annotations.get(oci.KEY),
            "problem": problem,
        }


def _is_trusted(bundle: Bundle) -> bool:
    try:
        return trust_cache.judge(bundle).ok
    except BundleError:  # A damaged key file in the trust directory does not prevent listing the bundles.
        return False


def _row(data: dict[str, object]) -> tuple[str, ...]:
    size = data.get("size")
    return (
        f"{data['name'] or '?'}:v{data['version']}",
        str(data["key"] or "?").removeprefix("sha256:")[:12],
        human_bytes(size) if isinstance(size, int) else "-",
        str(data.get("created") or data.get("problem")),
        str(data["digest"]).removeprefix("sha256:")[:12],
        "yes" if data["trusted"] else "no",
        shlex.join(arguments) if isinstance(arguments := data.get("arguments"), list) else "",
    )


def _text(listed: list[dict[str, object]]) -> str:
    return table(
        ("bundle", "key", "size", "created", "digest", "trusted", "arguments"),
        [_row(data) for data in listed],
    )
