"""Manage the keys whose bundles may run code here, and explain why a bundle is trusted."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from coldstart.artifacts.bundle import Bundle, TrustResult
from coldstart.commands._completion import complete_key, complete_reference
from coldstart.commands._options import Common, group
from coldstart.commands._options import command as declare
from coldstart.commands._output import one_line, table

from coldstart.errors import CommandFailedError
from coldstart.system import paths
from coldstart.system.trust import trusted_keys as trust

app = group(__doc__)


@app.command("list")
@declare()
def list_keys(common: Common) -> None:
    """List the keys whose bundles may run code here."""
    keys = trust.listed()
    rows = [(key.name, key.fingerprint or key.problem, "own" if key.own else "", key.file) for key in keys]
    brief = "\n".join(key.fingerprint for key in keys if key.fingerprint)
    data = {"keys": [asdict(key) for key in keys]}
    common.out.result(data, lambda: table(("name", "fingerprint", "", "file"), rows), brief=brief)


@app.command("add")
@declare()
def add_key(
    common: Common,
    file: Annotated[Path, typer.Argument(help="Public key (PEM), as trust show prints it.")],
    name: Annotated[str, typer.Option("--name", help="Name of the key on this machine.")] = "added",
) -> None:
    """Trust bundles that the owner of a key signs."""
    key = trust.add(file, name)
    common.out.result(asdict(key), f"added {key.name} ({key.fingerprint})", brief=str(key.fingerprint))
    common.out.success("Trusted a key", where=str(paths.state_dir()), then="coldstart trust list")


@app.command("remove")
@declare()
def remove_key(
    common: Common,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FINGERPRINT",
            help="Name or fingerprint of the key; 12 digits are sufficient.",
            autocompletion=complete_key,
        ),
    ],
) -> None:
    """Remove a trusted key. Bundles that only it signed run no code here any more."""
    removed = trust.remove(name)
    listed = "\n".join(one_line(f"{key.fingerprint or key.problem}  {key.file}") for key in removed)
    common.out.result({"removed": [asdict(key) for key in removed]}, listed)
    common.out.success("Removed a key", where=str(paths.state_dir()), then="coldstart trust list")


@app.command("show")
@declare()
def show_own(common: Common) -> None:
    """Print the public key of this machine. Others add it with trust add."""
    own = next((key for key in trust.listed() if key.own), None)
    mark = own.fingerprint if own else None
    pem = trust.own_public_key()
    common.out.result({"fingerprint": mark, "public_key": pem}, pem)
    file = common.out.out_file
    name = "FILE" if file is None else shlex.quote(file.name)
    common.out.note(f"Next, on the other machine: coldstart trust add {name}")


@app.command("why")
@declare()
def why(
    common: Common,
    ref: Annotated[str, typer.Argument(help="Bundle reference.", autocompletion=complete_reference)],
) -> None:
    """Explain why a bundle is trusted or not. Lists each signature, and the version that is selected."""
    store = common.store()
    bundle = common.get_bundle(ref)
    _ = bundle.manifest  # raises for a damaged one: a signature of its digest says nothing then
    verdict = trust.why(store, bundle)
    data = {
        "ref": bundle.ref,
        "version": bundle.version,
        **asdict(verdict.trust),
        "signatures": [
            {"key": _describe_key(one.signer, verdict), **asdict(one)} for one in verdict.signatures
        ],
        "taken": verdict.taken.ref if verdict.taken else None,
        "hint": verdict.hint,
    }
    common.out.result(data, lambda: _why(bundle, verdict), brief="yes" if verdict.trust.ok else "no")
    if not verdict.trust.ok:
        raise CommandFailedError(f"{bundle.ref} is not trusted: {verdict.trust.reason}", hint=verdict.hint)


def _why(bundle: Bundle, verdict: trust.Verdict) -> str:
    lines = [
        f"{bundle.name}:v{bundle.version} is {'trusted' if verdict.trust.ok else 'not trusted'}: {verdict.trust.reason}",
        *(
            f"signature {n}: {_describe_signature(one, verdict)}"
            for n, one in enumerate(verdict.signatures, 1)
        ),
    ]
    if verdict.taken is None:
        lines.append("no version of this key is trusted, so none is used without --untrusted")
    elif verdict.taken == bundle:
        lines.append("it is the selected version of its key")
    else:
        lines.append(f"v{verdict.taken.version} of its key is selected: the newest trusted version")
    return "\n".join(map(one_line, lines))


def _describe_signature(judged: TrustResult, verdict: trust.Verdict) -> str:
    key = _describe_key(judged.signer, verdict)
    return f"{'valid' if judged.ok else 'not trusted'}: {judged.reason}{f', {key}' if key else ''}"


def _describe_key(fingerprint: str | None, verdict: trust.Verdict) -> str | None:
    """Return whose key that is, None for one that is not in the trust directory."""
    key = verdict.keys.get(fingerprint or "")
    return None if key is None else "the key of this machine" if key.own else f"the key {key.name}"
