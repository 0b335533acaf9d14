"""Manage the keys whose bundles may run code here, and explain why a bundle is trusted."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from coldstart.artifacts import sign
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
    pem = sign.load_public_pem(paths.state_dir()).decode()
    common.out.result({"fingerprint": mark, "public_key": pem}, pem)
    file = common.out.out_file
    name = "FILE" if file is None else shlex.quote(file.name)
    common.out.note(f"Next, on the other machine: coldstart trust add {name}")


@app.command("why")
@declare()
def explain(
    common: Common,
    ref: Annotated[str, typer.Argument(help="Bundle reference.", autocompletion=complete_reference)],
) -> None:
    """Explain why a bundle is trusted or not. Lists each signature."""
    bundle = common.get_bundle(ref)
    _ = bundle.manifest  # raises for a damaged one: a signature of its digest says nothing then
    judge = sign.TrustStore(sign.trust_dir(paths.state_dir()))
    signatures, result = judge.verify_signatures(bundle), judge(bundle)
    data = {
        "ref": bundle.ref,
        "version": bundle.version,
        **asdict(result),
        "signatures": [asdict(one) for one in signatures],
    }
    lines = [f"{bundle.name}:v{bundle.version} is {'' if result.ok else 'not '}trusted: {result.reason}"]
    lines += [f"signature {n}: {one.reason}" for n, one in enumerate(signatures, 1)]
    common.out.result(data, "\n".join(map(one_line, lines)), brief="yes" if result.ok else "no")
    if not result.ok:
        hint = "coldstart trust add FILE, with the output on its publisher's machine of: coldstart trust show"
        raise CommandFailedError(f"{bundle.ref} is not trusted: {result.reason}", hint=hint)
