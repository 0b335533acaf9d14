"""Say whose bundles may run code here: list the trusted keys, add one, show this machine's own, explain a verdict."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from coldstart.artifacts.bundle import Bundle
from coldstart.commands._options import Common, group
from coldstart.commands._options import command as declare
from coldstart.commands._output import table

from coldstart.errors import CommandFailedError
from coldstart.models import inspection
from coldstart.system import paths
from coldstart.system.trust import trusted_keys as trust

app = group(__doc__)


@app.command("list")
@declare()
def list_keys(common: Common) -> None:
    """List the keys whose bundles may run code here."""
    keys = trust.listed()
    rows = [(key.fingerprint or key.problem, "own" if key.own else "", key.file) for key in keys]
    brief = "\n".join(key.fingerprint for key in keys if key.fingerprint)
    data = {"keys": [asdict(key) for key in keys]}
    common.out.result(data, lambda: table(("fingerprint", "", "file"), rows), brief=brief)


@app.command("add")
@declare()
def add_key(
    common: Common,
    file: Annotated[Path, typer.Argument(help="A public key (PEM), as trust show prints it.")],
    name: Annotated[str, typer.Option("--name", help="What to call it here.")] = "added",
) -> None:
    """Trust the bundles that the owner of this key signs."""
    key = trust.add(file, name)
    common.out.result(asdict(key), str(key.fingerprint))
    common.out.success("Trusted a key", where=str(paths.state_dir()), then="coldstart trust list")


@app.command("show")
@declare()
def show_own(common: Common) -> None:
    """Print this machine's public key, for others to add."""
    own = next((key for key in trust.listed() if key.own), None)
    mark = own.fingerprint if own else None
    pem = trust.own_public_key()
    common.out.result({"fingerprint": mark, "public_key": pem}, pem)
    common.out.note("Next, on the other machine: coldstart trust add FILE")


@app.command("why")
@declare()
def why(common: Common, ref: Annotated[str, typer.Argument(help="A bundle.")]) -> None:
    """Say why a bundle is trusted or not, signature by signature, and which version is taken."""
    store = common.store()
    bundle = store.get(ref, trust=inspection.trust)
    verdict = trust.why(store, bundle)
    data = {
        "ref": bundle.ref,
        "version": bundle.version,
        **asdict(verdict.trust),
        "signatures": [asdict(one) for one in verdict.signatures],
        "taken": verdict.taken.ref if verdict.taken else None,
        "hint": verdict.hint,
    }
    common.out.result(data, lambda: _why(bundle, verdict), brief="yes" if verdict.trust.ok else "no")
    if not verdict.trust.ok:
        raise CommandFailedError(f"{bundle.ref} is not trusted: {verdict.trust.reason}.", hint=verdict.hint)


def _why(bundle: Bundle, verdict: trust.Verdict) -> str:
    lines = [
        f"{bundle.name}:v{bundle.version} is {'trusted' if verdict.trust.ok else 'not trusted'}: {verdict.trust.reason}",
        *(
            f"signature {n}: {'good' if one.ok else 'no good'}: {one.reason}"
            for n, one in enumerate(verdict.signatures, 1)
        ),
    ]
    if verdict.taken is None:
        lines.append("no version of this key is trusted, so none is taken unless --untrusted is given")
    elif verdict.taken == bundle:
        lines.append("it is the version of its key that is taken")
    else:
        lines.append(f"of its key v{verdict.taken.version} is taken: trusted, and made last")
    return "\n".join(lines)
