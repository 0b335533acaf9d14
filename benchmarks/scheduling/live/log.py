"""Finished runs, one JSON line each, so that an interrupted campaign loses nothing and goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Log:
    """Rows of one campaign; a half-written last line is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                self.rows.append(json.loads(line))
            except ValueError:
                continue

    def add(self, row: Row) -> None:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def find(self, **wanted: object) -> Row | None:
        """The first row with these members."""
        return next((row for row in self.rows if wanted.items() <= row.items()), None)
