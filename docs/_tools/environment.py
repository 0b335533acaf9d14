"""Write docs/reference/environment.md from the table of environment variables.

Run: python docs/_tools/environment.py
"""

from __future__ import annotations

from pathlib import Path

from coldstart.contract.environment import EVERY, PREFIX, Variable

PAGE = Path(__file__).parents[1] / "reference/environment.md"
HEADINGS = {
    "user": "Set by the user",
    "foreign": "Variables of other software that coldstart reads",
    "internal": "Internal: coldstart sets them for its own processes",
}


def table() -> str:
    """Return the text of the page."""
    lines = [
        "# Environment variables",
        "",
        f"Every option of a command also has an environment variable: `{PREFIX}_<COMMAND>_<OPTION>`.",
    ]
    for audience, heading in HEADINGS.items():
        lines += ["", f"## {heading}", "", "| name | type | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [row(variable) for variable in EVERY if variable.audience == audience]
    return "\n".join(lines) + "\n"


def row(variable: Variable[object]) -> str:
    """Return the line of one variable."""
    default = variable.default
    shown = (
        "" if default in ("", -1.0, False) else f"{default:g}" if isinstance(default, float) else str(default)
    )
    return f"| `{variable!s}` | {variable.kind} | {shown} | {variable.about} |"


if __name__ == "__main__":
    PAGE.write_text(table(), encoding="utf-8")
