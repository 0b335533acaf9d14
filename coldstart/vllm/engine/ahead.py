"""Do work of every worker once, in the process that forks the workers.

On the CPU, each vLLM worker searches all imported modules for Triton kernels to replace. This takes a third of a second, and a
forked worker copies the memory that it reads. If it is done before the fork, it holds for every child: a module that a child
imports later gets the replacement from the module that defines the kernel.
"""

from __future__ import annotations

from coldstart.vllm import compat


def prepare() -> None:
    """Run the worker's model-independent steps ahead: replace kernels and import modules. No effect if this vLLM has no
    such steps.

    Call it before a fork, and only in a process that does not serve.
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
    # Set on this process's object, so that its children skip the search.
    platform.register_triton_kernel_overrides = lambda: None
