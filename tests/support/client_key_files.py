"""Files of clients' keys."""

from collections.abc import Mapping
from pathlib import Path


def write_clients(directory: Path, clients: Mapping[str, str]) -> Path:
    """Write a client key file and return it. `clients` maps each name to its further lines; its key is key-of-NAME."""
    for name in clients:
        key = directory / f"{name}.key"
        key.write_text(f"key-of-{name}\n")
        key.chmod(0o600)
    tables = (f'[{name}]\nkey_file = "{name}.key"\n{lines}\n' for name, lines in clients.items())
    file = directory / "keys.toml"
    file.write_text("\n".join(tables))
    return file
