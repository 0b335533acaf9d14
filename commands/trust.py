"""Manage the signing keys whose bundles may run code on this machine, and explain why a bundle is trusted."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from coldstart.artifacts import sign
from coldstart.commands._completion import complete_reference, complete_trusted_key
from coldstart.commands._options import Common, group
from coldstart.commands._options import command as declare
from coldstart.commands._output import escape_line, format_table

from coldstart.errors import CommandFailedError
from coldstart.system import paths
from coldstart.system.trust import trusted_keys as trust

app = group(__doc__)


@app.command("list")
@declare()
def list_keys(common: Common) -> None:
    """List the trusted keys. Bundles signed with them may run code on this machine."""
    keys = trust.list_keys()
    rows = [(key.name, key.fingerprint or key.problem, "own" if key.own else "", key.file) for key in keys]
    brief = "\n".join(key.fingerprint for key in keys if key.fingerprint)
    data = {"keys": [asdict(key) for key in keys]}
    common.out.print_result(
        data, lambda: format_table(("name", "fingerprint", "", "file"), rows), brief=brief
    )


@app.command("add")
@declare()
def add_key(
    common: Common,
    file: Annotated[
        Path, typer.Argument(help="PEM file with a public key, as printed by `coldstart trust show`.")
    ],
    name: Annotated[str, typer.Option("--name", help="Name for the key on this machine.")] = "added",
) -> None:
    """Trust the bundles signed with a key."""
    key = trust.add_key(file, name)
    common.out.print_result(asdict(key), f"added {key.name} ({key.fingerprint})", brief=str(key.fingerprint))
    common.out.print_success("Trusted a key", where=str(paths.state_dir()), then="coldstart trust list")


@app.command("remove")
@declare()
def remove_key(
    common: Common,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FINGERPRINT",
            help="Name or fingerprint of the key; the first 12 digits of a fingerprint are sufficient.",
            autocompletion=complete_trusted_key,
        ),
    ],
) -> None:
    """Remove a trusted key. Bundles signed only with this key can no longer run code on this machine."""
    removed = trust.remove_keys(name)
    text = "\n".join(escape_line(f"{key.fingerprint or key.problem}  {key.file}") for key in removed)
    common.out.print_result({"removed": [asdict(key) for key in removed]}, text)
    common.out.print_success("Removed a key", where=str(paths.state_dir()), then="coldstart trust list")


@app.command("show")
@declare()
def show_own(common: Common) -> None:
    """Print the public key of this machine. On another machine, `coldstart trust add` trusts this key."""
    own = next((key for key in trust.list_keys() if key.own), None)
    fingerprint = own.fingerprint if own else None
    pem = sign.load_host_key(paths.state_dir()).public_pem.decode()
    common.out.print_result({"fingerprint": fingerprint, "public_key": pem}, pem)
    file = common.out.out_file
    name = "FILE" if file is None else shlex.quote(file.name)
    common.out.print_note(f"Next, on the other machine: coldstart trust add {name}")


@app.command("why")
@declare()
def explain(
    common: Common,
    ref: Annotated[str, typer.Argument(help="Bundle reference.", autocompletion=complete_reference)],
) -> None:
    """Explain why a bundle is trusted or not. The output lists its signatures."""
    bundle = common.get_bundle(ref)
    _ = bundle.manifest  # raises if it is damaged: signatures of its digest then prove nothing
    store = sign.TrustStore(sign.trust_dir(paths.state_dir()))
    signatures, result = store.verify_signatures(bundle), trust.check_trust(bundle)  # as a start decides
    data = {
        "ref": bundle.ref,
        "version": bundle.version,
        **result.to_document(),
        "signatures": [signature.to_document() for signature in signatures],
    }
    lines = [
        f"{bundle.name}:v{bundle.version} is {'' if result.is_trusted else 'not '}trusted: {result.reason}"
    ]
    lines += [f"signature {n}: {signature.reason}" for n, signature in enumerate(signatures, 1)]
    common.out.print_result(
        data, "\n".join(map(escape_line, lines)), brief="yes" if result.is_trusted else "no"
    )
    if not result.is_trusted:
        hint = "run `coldstart trust add FILE`; the publisher creates FILE with `coldstart trust show`"
        raise CommandFailedError(f"bundle {bundle.ref} is not trusted: {result.reason}", hint=hint)
