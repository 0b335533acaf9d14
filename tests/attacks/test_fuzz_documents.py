"""No mutation of a plain section or of the config makes a reader crash or write outside its directory.

The digests are right, so that readers get past the first check. `make fuzz` mutates the bytes of manifests and trees.
"""

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import pytest
from coldstart.artifacts import canonical, oci
from coldstart.artifacts.bundle import accept_any
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.key import Key
from coldstart.artifacts.manifest import SECTION_TYPES
from coldstart.artifacts.prune import prune
from coldstart.artifacts.store import Store
from coldstart.commands import bundles, inspect
from coldstart.commands._options import Common
from coldstart.commands._output import Format, Output
from tools import tiny_models
from tools.bundles import config, plant, provenance

from coldstart.contract.arguments import Arguments
from coldstart.errors import ColdstartError
from coldstart.launch import planning
from coldstart.launch.planning import ServeRequest
from coldstart.models import inspection
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.system.paths import Cache
from coldstart.validate.checks import check

DEADLINE_S = 5.0
NUMBERS = (None, True, False, 0, -1, 1, 10**9, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, 1e-308)
TEXTS = (
    "",
    "x" * 5000,
    "\0",
    "\x1b[2J",
    "../../etc/passwd",
    "/etc/passwd",
    "~root",
    "\u202e",
    "NaN",
    "sha256:",
)
PLACES = ("C:\\x", "${HOME}", "; rm", "\n", "é" * 300, "http://127.0.0.1:1/x", "file:///etc/passwd")
NESTED = ([], {}, [[]], [None], {"": None}, [1, "a", None], {"a": {"a": {"a": []}}}, [0] * 3000)
EVIL: tuple[Any, ...] = (*NUMBERS, *TEXTS, *PLACES, *NESTED)
TENSOR = {
    "name": "model.norm.weight",
    "dtype": "F32",
    "shape": [1],
    "offset": 8,
    "size": 4,
    "digest": "0" * 64,
}
SECTIONS: dict[str, Any] = {
    "kv": {"bytes": 1 << 20, "blocks": 7, "bytes_per_block": 4096.5},
    "iterations": {"prefill": [[1, 0.01], [64, 0.1]], "decode": [[1, 0.01], [8, 0.02]]},
    "stages": {"ready_s": 6.0, "spans": {"load weights": 0.1, "import": 2.0}, "not_made": {"graphs": "no GPU"}},
    "modelinfo": {
        "vllm_modelinfos": {"vllm-model.json": '{"hash": "0", "modelinfo": {}}'},
        "canary": {"prompt": [1, 2, 3], "tokens": [5, 6]},
        "weights": f"sha256:{'1' * 64}",
    },
    "weights": {
        "chunk": 16 << 20,
        "files": [{"name": "model.safetensors", "size": 12, "chunks": ["0" * 64], "tensors": [TENSOR]}],
    },
}  # fmt: skip


def mutate(value: Any, chance: random.Random) -> Any:
    """Return a copy of `value` with one member replaced, removed, renamed or repeated."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.08:
        return chance.choice(EVIL)
    items = dict(value if isinstance(value, dict) else enumerate(value))
    member = chance.choice(list(items))
    how = chance.choice(("replace", "replace", "remove", "rename", "repeat"))
    if how == "replace":
        items[member] = mutate(items[member], chance)
    elif how == "repeat" and isinstance(value, list):
        items |= {len(items) + number: one for number, one in enumerate(value[:200])}
    else:
        taken = items.pop(member)
        items |= {str(chance.choice(EVIL))[:200]: taken} if how == "rename" else {}
    return items if isinstance(value, dict) else list(items.values())


def mutate_often(value: Any, chance: random.Random) -> Any:
    for _ in range(chance.choice((1, 1, 2, 5))):
        value = mutate(value, chance)
    return value


def write(store: Store, key: Key, target: str, chance: random.Random) -> None:
    """Publish a bundle whose only defect is the mutated `target`."""
    if target == "config":
        document = mutate_often(config(key=dict(key.fields)), chance)
        plant(store, json.dumps(document).encode())
        return
    with store.open_draft(key) as draft:
        for name, value in SECTIONS.items():
            document = mutate_often(value, chance) if name == target else value
            with draft.staging.open_blob() as file:
                file.write(json.dumps(document).encode() if name == target else canonical.serialize(document))
            kind = SECTION_TYPES[name].media_type
            draft.sections[name] = oci.Descriptor(kind, file.digest, file.size)
        draft.publish(provenance())


def read_list(store: Store, model: str) -> None:
    for bundle in store.list_bundles():
        bundles._format_row(bundles._describe_bundle(bundle))


def read_inspect(store: Store, model: str) -> None:
    bundle, forms = store.find_by_reference("org/tiny"), get_args(Format)
    for common in (
        Common(Output(form), offline=True, cache=Cache.at(), vllm_args=Arguments()) for form in forms
    ):
        inspect.show_bundle(common, bundle)
        inspect.show_files(common, bundle)


def read_validate(store: Store, model: str) -> None:
    for bundle in store.list_bundles():
        check(bundle)


def plan_serve(store: Store, model: str, **more: Any) -> None:
    found = inspection.look_up(model, accepts=accept_any)
    json.dumps(planning.plan(ServeRequest(found, without_bundle=True, **more)).document())


def plan_scheduled(store: Store, model: str) -> None:
    plan_serve(store, model, scheduler=SchedulerSettings("skip-join-mlfq"))


def plan_fetched(store: Store, model: str) -> None:
    plan_serve(store, model, weights_from="http://127.0.0.1:1/w")


READERS: tuple[Callable[[Store, str], None], ...] = (
    read_list, read_inspect, read_validate, plan_serve, plan_scheduled, plan_fetched,
)  # fmt: skip


@contextmanager
def writes_outside(root: Path) -> Iterator[list[str]]:
    """Record paths outside of `root` that this process creates, opens for writing, moves or removes in the block."""
    found, watching = list[str](), True
    # Threads of earlier tests may still remove what their servers left.
    earlier = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    allowed = (f"{root.resolve()}/", "/dev/", "/proc/")
    names = {"os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.truncate"}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching or threading.get_ident() in earlier or (event not in names and event != "open"):
            return
        if event in ("os.remove", "os.rmdir") and arguments[1] != -1:
            return  # below a directory that was opened before
        path, flags = arguments[0], arguments[2] if event == "open" else os.O_WRONLY
        if isinstance(path, str | bytes | os.PathLike) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            whole = str(Path(os.fsdecode(path)).absolute())
            if not whole.startswith(allowed) and "__pycache__" not in whole:
                found.append(f"{event} {whole}")

    sys.addaudithook(hook)
    try:
        yield found
    finally:
        watching = False


@pytest.mark.slow
def test_readers_refuse_or_read_each_mutation(home: Path) -> None:
    tiny_models.require_vllm()
    model = tiny_models.write_empty(home / "my-model")
    key, refused, read = inspection.look_up(str(model)).key, 0, 0
    with writes_outside(home) as strayed:
        for seed in range(20 * (len(SECTIONS) + 1)):
            chance, store = random.Random(seed), Store(Cache.at().bundles)
            with suppress(BundleError):
                write(store, key, [*SECTIONS, "config"][seed % (len(SECTIONS) + 1)], chance)
            for reader in READERS:
                began = time.monotonic()
                try:
                    reader(Store(store.root), str(model))
                    read += 1
                except (BundleError, ColdstartError):
                    refused += 1
                except Exception as error:
                    raise AssertionError(f"{reader.__name__} of seed {seed}") from error
                assert time.monotonic() - began < DEADLINE_S, (reader.__name__, seed)
            prune(store.layout, keep=None, drop=store.list_bundles())
    assert strayed == [] and refused > 30 and read > 300  # some were refused, and not all
