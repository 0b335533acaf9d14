"""Bundle key: the key <GPU, model> of MEDUSA, extended by everything that changes the materialized state.

key = hardware.* + model.* + runtime.* + engine.*. Two machines that would produce the same artifacts compose the same key; any
difference that could make an artifact wrong composes another key. No path, host name or environment variable is a
field. This module imports neither torch nor vllm.
"""

from collections.abc import Mapping

from coldstart.artifacts.key import Key
from coldstart.contract.arguments import Arguments
from coldstart.models import identity, relevance
from coldstart.models.resolution import ResolvedModel
from coldstart.system import runtime
from coldstart.system.devices import hardware

ENGINE = "engine."
"""Prefix of the fields that come from vLLM's arguments."""
Scalar = str | int | float | bool | None


def compose(model: ResolvedModel, vllm_args: Arguments) -> Key:
    """Compose the key of ``model`` with vLLM's arguments on this machine, in this environment.

    Raises:
        ColdstartError: vLLM is not installed.
        UsageError: The weights are unreadable.
    """
    groups: dict[str, Mapping[str, Scalar]] = {
        "hardware": hardware_fields(on_cpu=runtime.targets_cpu()),
        "model": identity.fields(model),
        "runtime": runtime.fields(),
        "engine": relevance.engine_fields(vllm_args.normal),
    }
    return Key({f"{group}.{name}": value for group, part in groups.items() for name, value in part.items()})


def replace_arguments(key: Key, vllm_args: Arguments) -> Key:
    """Return `key` with the engine fields of other arguments: the model and the machine are not read again."""
    fields = {name: value for name, value in key.fields.items() if not name.startswith(ENGINE)}
    engine = relevance.engine_fields(vllm_args.normal)
    return Key(fields | {f"{ENGINE}{name}": value for name, value in engine.items()})


def hardware_fields(*, on_cpu: bool) -> dict[str, Scalar]:
    """Return the hardware fields that matter to the engine's device.

    The key of a CPU engine contains the number of usable processors. Inductor chooses the depth of parallel loops by it
    (decide_parallel_depth, even with vLLM's dynamic_threads), and iteration times depend on it. Artifacts of a GPU engine
    depend only on the host's architecture and the driver's branch, because one fleet can have several minor releases of
    a driver. CUDA graphs need the exact driver version and check it themselves.
    """
    cpu = hardware.cpu()
    return cpu if on_cpu else {"cpu.machine": cpu["cpu.machine"], **hardware.gpu()}
