"""What each worker would do anew, done once in a process that forks them.

vLLM looks through every imported module for Triton kernels that its CPU engine replaces, in each worker: a third of a second,
and a forked worker copies the memory of all that it looks at. Done before the fork, it holds for every child: what a child
imports later takes the replacement from the module that defines the kernel.
"""

from __future__ import annotations

from coldstart.vllm import compat


def prepare() -> None:
    """Replace the kernels and import what a worker of any model imports; nothing where this vLLM has no such step.

    Before a fork, and only in a process that serves nothing itself.
    """
    compat.check("ahead", _replace_kernels)


def _replace_kernels() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm.compilation.backends
    import vllm.model_executor.layers.quantization.online.base  # noqa: F401

    current_platform.register_triton_kernel_overrides()
    platform = current_platform
    # Of this process's own object: its children find it done.
    platform.register_triton_kernel_overrides = lambda: None
