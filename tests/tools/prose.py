"""Find prose that a reader of this field has to decode: expressions of `prose.toml`, help texts without a full stop, and
errors with one.

Reads docstrings, comments and texts of the packages, names of modules, classes, functions, parameters and fields, and the
Markdown pages outside of code blocks.
Run: python tests/tools/prose.py
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("coldstart", "commands", "artifacts")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs", "artifacts", "examples")
RULES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FEW_WORDS = 3
HELP = re.compile(r"[A-Z(].*[.:]", re.DOTALL)
ERROR = re.compile(r"(?![A-Z][a-z]+ (?!did|needs|such)).*(?<!\w\.)", re.DOTALL)
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def main() -> int:
    """Print the findings; return 1 if there are any."""
    found = list(find(ROOT))
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


def find(root: Path) -> Iterator[str]:
    """Yield one line per finding: path, line number, expression and replacement."""
    replacements: Mapping[str, str] = RULES["replace"]
    banned = re.compile(rf"\b(?:{'|'.join(replacements)})\b", re.IGNORECASE)
    for path in files(root):
        name = str(path.relative_to(root))
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text))) if path.suffix == ".py" else None
        named = [(1, split_name(path.stem))]
        for line, prose in [*named, *(read_markdown(text) if nodes is None else read_python(text, nodes))]:
            for match in banned.finditer(prose):
                words = match[0].lower()
                if words not in RULES["allow"].get(name, ()):
                    yield f"{name}:{line}: {words!r}: write {choose(words, replacements)}"
        for line, help_text in read_helps(nodes or ()):
            if not HELP.fullmatch(help_text):
                yield f"{name}:{line}: help text without a capital or a full stop: {help_text!r}"
        for line, error in read_errors(nodes or ()):
            if not ERROR.fullmatch(error):
                yield f"{name}:{line}: error with a capital or a full stop: {error!r}"


def choose(words: str, replacements: Mapping[str, str]) -> str:
    """Return the replacement of an expression."""
    return next(text for pattern, text in replacements.items() if re.fullmatch(pattern, words, re.IGNORECASE))


def files(root: Path) -> Iterator[Path]:
    """Yield the modules of the packages and the Markdown pages."""
    for name in CODE:
        yield from sorted((root / name).rglob("*.py"))
    for name in PAGES:
        path = root / name
        yield from sorted(path.rglob("*.md")) if path.is_dir() else [path] * path.is_file()


def read_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each line outside of code blocks."""
    blank = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    yield from enumerate(blank.splitlines(), 1)


def read_python(text: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line number and text of docstrings, comments, texts with more than FEW_WORDS words, and words of names."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, split_name(node.name)
        elif isinstance(node, ast.arg):
            yield node.lineno, split_name(node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.lineno, split_name(node.target.id)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.count(" ") >= FEW_WORDS
        ):
            yield node.lineno, " ".join(node.value.split())
    # What follows a # in a text is read as a comment too: to tell them apart would double the time.
    for number, line in enumerate(text.splitlines(), 1):
        if "#" in line:
            yield number, line[line.index("#") :]


def split_name(name: str) -> str:
    """Return the words of a name in snake case or camel case."""
    return " ".join(WORD.findall(name))


def read_helps(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each literal `help=`."""
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg == "help":
            yield from literals([node.value])


def read_errors(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line number and text of the literal first argument of each exception of this project."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Error"):
            yield from literals(node.args[:1])


def literals(nodes: Iterable[ast.expr]) -> Iterator[tuple[int, str]]:
    """Yield line number and text of literals; a value that is filled in at run time is X."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values),
            )


if __name__ == "__main__":
    sys.exit(main())
