"""List of all run-time changes of vLLM's objects.

One function is restored before a server listens. Classes and modules are changed on a GPU for graphs, KV plans and compiled
code, and everywhere by wrappers that report the progress of a start. A new change must be added here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOM = Path(__file__).parents[3] / "coldstart" / "vllm"

ON_CLASSES_AND_MODULES = {
    # Wrappers: a subclass of tqdm that counts, and methods that report and then run unchanged.
    "counting.py": {"module.tqdm", "module.CompilerManager.compile", "kind method"},
    "engine/application.py": {"entry.build_app"},
    "engine/aot.py": {"module._try_load_aot_compiled_fn", "worker COMPILE_REPORT"},
    "engine/collection.py": {"core.freeze_gc_heap", "module.freeze_gc_heap", "module.memory_profiling", "gc name"},
    "graphs/hook.py": {"*place", "*places[name]"},
    "graphs/plugin.py": {
        "kind.capture_model", "kind.load_model", "module.maybe_apply_startup_plan", "module.maybe_save_startup_plan",
        "module.Worker GRAPHS_REPORT", "worker KV_REPORT",
    },
    # Objects of torch, while graphs are recorded or proved, a template is built, or compiled code is stored.
    "graphs/record.py": {"torch.cuda.CUDAGraph"},
    "engine/executor.py": {"torch.set_num_threads"},
    "engine/compiled.py": {"AOTCompilePickler.reducer_override"},
    "engine/kernel_names.py": {"codecache.write"},
}  # fmt: skip
"""Changes for the lifetime of the process; hook.py, record.py, application.py, executor.py and compiled.py undo theirs."""

ON_OBJECTS = {
    "engine/compiled.py": {
        "modules[name].aot_compiled_fn", "modules[name].was_aot_compile_fn_loaded_from_disk",
    },
    "engine/ahead.py": {"platform.register_triton_kernel_overrides"},
    "engine/executor.py": {
        "worker.worker.kv_transfer_config", "worker.worker.vllm_config.kv_transfer_config",
        "config.parallel_config.worker_cls", "config.parallel_config.worker_extension_cls",
    },
    "engine/server.py": {"config.logging_config", "engine.shutdown", "manager.shutdown"},
    # Other objects: the hub's offline switch, a connection to a Unix socket, and the directory of temporary files.
    "engine/renewal.py": {"constants.HF_HUB_OFFLINE"},
    "stock.py": {"connection.sock"},
    "engine/template.py": {"tempfile.tempdir"},
    "engine/worker.py": {"self.model_runner.__class__"},
    "graphs/manager.py": {"self._manager._candidates", "manager name"},
    "graphs/record.py": {"runner.execute_model"},
    "graphs/restore.py": {"manager name", "runner.cudagraph_manager name"},
    "scheduling/flight.py": {"self book.__name__"},
    "scheduling/host.py": {"connector.get_num_new_matched_tokens"},
    "scheduling/settle.py": {"transfer.kv_connector", "transfer.kv_connector_module_path"},
    "scheduling/tails.py": {
        "scheduler._lookup", "scheduler._make_boundary_key", "group.next_stored_chunk_idx", "status.partial_tail_boundary",
    },
}  # fmt: skip
"""Changes of this server's objects: settable attributes of vLLM, one class replaced by our subclass, seven wrapped methods, and
two methods of our scheduler replaced by those of vLLM's other one."""

# Ours, the parsed arguments, torch's tensors, and other libraries' settings.
_HARMLESS = re.compile(
    r"self\.\w+$|self\.(_?counters|policy|report|started|jobs|ranking)\b|(job|made|args|parameter|tensor|tqdm|values|sys|spec\.loader)\."
)


def _stores() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOM.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            place = str(path.relative_to(ROOM))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                yield place, ast.unparse(node)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr"):
                yield place, " ".join(ast.unparse(one) for one in node.args[: 1 + (len(node.args) > 2)])


def test_no_other_object_of_vllm_is_changed() -> None:
    listed = {
        (place, what)
        for table in (ON_CLASSES_AND_MODULES, ON_OBJECTS)
        for place, names in table.items()
        for what in names
    }
    found = {(place, what.partition(", ")[0]) for place, what in _stores()}
    assert listed <= found
    assert {one for one in found - listed if not _HARMLESS.match(one[1])} == set()
