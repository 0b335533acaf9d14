"""The key <GPU, model> of MEDUSA, widened to all that decides what is materialized.

key = hardware.* + model.* + runtime.* + engine.*; two machines that would produce the same artifacts compose
the same key, any difference that could make an artifact wrong composes another. No path, host name or
environment variable is a field. Nothing here imports torch or vllm.
"""

from collections.abc import Mapping

from coldstart.artifacts.key import Key
from coldstart.contract.arguments import Arguments
from coldstart.models import identity, relevance
from coldstart.models.resolution import ResolvedModel
from coldstart.system import runtime
from coldstart.system.devices import hardware

Scalar = str | int | float | bool | None


def compose(model: ResolvedModel, vllm_args: Arguments) -> Key:
    """The key of ``model`` run on this machine, in this environment, with vLLM's arguments.

    Raises ColdstartError where vLLM is not installed, UsageError for unreadable weights.
    """
    groups: dict[str, Mapping[str, Scalar]] = {
        "hardware": hardware_fields(on_cpu=runtime.targets_cpu()),
        "model": identity.fields(model),
        "runtime": runtime.fields(),
        "engine": relevance.engine_fields(vllm_args.normal),
    }
    return Key({f"{group}.{name}": value for group, part in groups.items() for name, value in part.items()})


def hardware_fields(*, on_cpu: bool) -> dict[str, Scalar]:
    """The part of the fingerprint that matters to the engine's device.

    The number of usable processors is in the key of a CPU engine: inductor chooses the loop depth it makes
    parallel by it (decide_parallel_depth, even with the dynamic_threads that vLLM sets), and iteration times
    are measured with it. A GPU engine's artifacts depend on the architecture of the host alone, and on the driver's
    branch: one fleet has several minor releases of it. What needs the exact driver (CUDA graphs) says so itself.
    """
    cpu = hardware.cpu()
    return cpu if on_cpu else {"cpu.machine": cpu["cpu.machine"], **hardware.gpu()}
