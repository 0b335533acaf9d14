"""Write docs/reference/commands.md and a page for each command, from the help of the command line.

Run: python docs/_tools/commands.py
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from coldstart.commands import cli
from coldstart.commands._examples import EXAMPLES
from coldstart.commands._options import SHARED

REFERENCE = Path(__file__).parents[1] / "reference"
ON_ONE_PAGE = 6
EXTRA = re.compile(r"\s*\[(?:env var: [A-Z_]+(?:; )?)?([^\[\]]*)\]$")
INDEX = """# Commands

`coldstart --help` lists the commands, and `coldstart COMMAND --help` shows the options of one command. This page and the pages
of the commands are generated from that help.

- An option follows the name of its command: `coldstart list --cache-dir DIR`.
- Arguments after `--` go to vLLM. Those that change what is built are part of the key of a bundle.
- Each option has an environment variable `COLDSTART_<COMMAND>_<OPTION>`, such as `COLDSTART_SERVE_PORT`. The command line takes
  precedence over the environment.
- [Exit codes](exit-codes.md) have a page of their own.
"""


def pages() -> dict[str, str]:
    """Return the text of each page by its path below docs/reference."""
    context = typer.main.get_command(cli.app).make_context("coldstart", [], resilient_parsing=True)
    made = [one for name in cli.COMMANDS for one in build_pages(cli.load(name), context)]
    return {"commands.md": index(context), **dict(made)}


def index(context: Any) -> str:
    """Return the page that lists the commands and the options that all of them have."""
    lines = [INDEX]
    for heading, rows in ((heading, list(group.items())) for heading, group in cli.HEADINGS.items()):
        lines += [f"## {heading}\n", "| Command | Purpose |", "|---|---|"]
        lines += [f"| [`coldstart {name}`](commands/{name}.md) | {escape(about)} |" for name, about in rows]
        lines += [""]
    shared = [one for one in cli.load("list").params if one.name in SHARED]
    lines += ["## Options of all commands\n", *options(shared, context), ""]
    return "\n".join(lines)


def build_pages(command: Any, parent: Any) -> Iterator[tuple[str, str]]:
    """Yield path and text of a command's page. A group of many commands has a page for each of them."""
    context = command.make_context(command.name, [], parent=parent, resilient_parsing=True)
    below = getattr(command, "commands", {})
    alone = len(below) > ON_ONE_PAGE
    lines = [f"# coldstart {command.name}", "", *described(command, context, command.name)]
    for name, one in below.items():
        full = f"{command.name} {name}"
        own = one.make_context(name, [], parent=context, resilient_parsing=True)
        section = list(described(one, own, full))
        if alone:
            yield f"commands/{command.name}-{name}.md", join([f"# coldstart {full}", "", *section])
            lines += [f"- [`coldstart {full}`]({command.name}-{name}.md): {section[0]}"]
        else:
            lines += [f"## coldstart {full}", "", *section]
    yield f"commands/{command.name}.md", join(lines)


def join(lines: list[str]) -> str:
    """Return lines as the text of a page."""
    return "\n".join(lines).rstrip() + "\n"


def described(command: Any, context: Any, name: str) -> Iterator[str]:
    """Yield the lines that describe one command: purpose, usage, arguments, options, examples."""
    for paragraph in (command.help or "").strip().split("\n\n"):
        yield from [" ".join(paragraph.split()), ""]
    if hasattr(command, "commands"):
        return
    pieces = [plain(piece) for piece in command.collect_usage_pieces(context)]
    # A subcommand's own usage does not show it.
    if getattr(command.callback, "takes_vllm_args", False) and cli.VLLM_ARGUMENTS_USAGE not in pieces:
        pieces.append(cli.VLLM_ARGUMENTS_USAGE)
    yield from ["```", " ".join(["coldstart", name, *pieces]), "```", ""]
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    if arguments:
        yield from ["| Argument | Meaning |", "|---|---|"]
        for one in arguments:
            shown, about = one.get_help_record(context) or (one.human_readable_name, "")
            yield f"| `{plain(shown)}` | {escape(EXTRA.sub('', about))} |"
        yield ""
    own = [
        one for one in command.params if one.param_type_name == "option" and one.name not in (*SHARED, "help")
    ]
    yield from [*options(own, context), ""] if own else []
    if examples := EXAMPLES.get(name) or EXAMPLES.get(f"{name} run"):
        yield from ["Examples:", "", "```sh", *examples, "```", ""]


def options(parameters: list[Any], context: Any) -> Iterator[str]:
    """Yield the table of options."""
    yield from ["| Option | Value | Meaning | Default |", "|---|---|---|---|"]
    for one in parameters:
        record = one.get_help_record(context)
        if record is None:
            continue
        shown, about = record
        names = [name for name in re.findall(r"--?[\w-]+", shown) if name in (*one.opts, *one.secondary_opts)]
        value = plain(re.sub(r"^(?:--?[\w-]+(?:, | / )?)+", "", shown).strip())
        extra = EXTRA.search(about)
        default = re.search(r"default: ([^;\]]+)", extra[1]) if extra else None
        cells = [
            ", ".join(f"`{name}`" for name in names),
            f"`{value}`" if value else "",
            escape(EXTRA.sub("", about)),
            f"`{default[1]}`" if default else "",
        ]
        yield f"| {' | '.join(cells)} |"


def plain(metavar: str) -> str:
    """Return a metavar without the marks that break a table."""
    return re.sub(r"[{}<>]", "", metavar).replace("|", ", ")


def escape(text: str) -> str:
    """Return help as the text of a table cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Write all pages."""
    shutil.rmtree(REFERENCE / "commands", ignore_errors=True)
    (REFERENCE / "commands").mkdir()
    for path, text in pages().items():
        (REFERENCE / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
