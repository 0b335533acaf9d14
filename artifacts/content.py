"""Check that a section that is not executable contains no code: no pickle, no compiled object, no program source.

This module does not sandbox code. coldstart never unpickles a section; the check protects other tools that read the tree.
"""

from __future__ import annotations

import pickletools
import re

from coldstart.artifacts.errors import CodeFoundError, PickleFoundError

HEAD = 1 << 20
_PICKLE_NAMES = frozenset({".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib", ".dill", ".npy", ".npz"})
_CODE_NAMES = frozenset({".py", ".pyc", ".pyd", ".so", ".dll", ".dylib", ".sh", ".cubin", ".fatbin", ".ptx"})
_CODE_MAGIC = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"#!")
_ZIP_MAGIC = b"PK\x03\x04"
_BINARY_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_CALLS = frozenset({"GLOBAL", "INST", "OBJ", "STACK_GLOBAL", "REDUCE"})


def check_plain(name: str, head: bytes) -> None:
    """Check a member by its name and its first bytes. Raises PickleFoundError or CodeFoundError."""
    base = name.rpartition("/")[2].lstrip(".").lower()
    suffixes = {f".{part}" for part in base.split(".")[1:]}
    if suffixes & _PICKLE_NAMES or _looks_pickled(head):
        raise PickleFoundError(f"{name} is a pickle, or a container of pickles")
    if suffixes & _CODE_NAMES or head.startswith(_CODE_MAGIC):
        raise CodeFoundError(f"{name} is program code")


def _looks_pickled(head: bytes) -> bool:
    # torch.save writes a zip archive around a pickle; no tokenizer file is a zip archive.
    return bool(head) and bool(
        head.startswith(_ZIP_MAGIC) or _BINARY_PICKLE.match(head) or _is_text_pickle(head)
    )


def _is_text_pickle(head: bytes) -> bool:
    # Protocols 0 and 1 have no magic: only a stream that parses to its STOP and calls something counts.
    calls = False
    try:
        for opcode, _, _ in pickletools.genops(head):
            calls = calls or opcode.name in _CALLS
    except Exception:  # noqa: BLE001 - pickletools raises whatever the malformed bytes provoke
        return False
    return calls
