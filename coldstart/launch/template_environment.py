"""The environment of a process that is kept: what it may see, and what of it decides whom it may serve.

A template or a snapshot read its environment when it was started: libraries at their load, modules at their import, the
worker when it was built. Two rules follow. It is given nothing but what is named here, so that no secret of its maker stands in
its memory. And whoever asks for a server has the same value for every variable that counts, or is told which differs.

Opt-out: a variable of a family counts unless IRRELEVANT says why it cannot matter. A secret never counts: it is given to no
kept process, and those who need one ask the server's own environment when they use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.system import secrets

# Everybody whose sources or libraries a server loads, by the beginnings of their variables' names.
_FAMILIES_TEXT = """
    VLLM _VLLM TORCH _TORCH PYTORCH PT2_ PT_ TRITON INDUCTOR AOT FX_ FSDP_ DCP_ PARTITIONER_ TENSORIFY_ UNSAFE_SKIP_
    FAKE_ALLOW_ CUTLASS CUTEDSL ENABLE_ LOG_AUTOTUNE DUMP_AOTI COMPILE_STROBELIGHT DISABLE_ TEARDOWN_ HALIDE QUACK_ FLA_ LTC_
    OMP_ GOMP_ KMP_ MKL DNNL_ ONEDNN_ OPENBLAS_ GOTO_ BLIS_ NUMEXPR_ NUMPY_ NPY_ NUMBA_ ATEN_ C10_ CAFFE2_ KINETO_ IPEX_
    GLIBC_ MALLOC_ JEMALLOC TCMALLOC MIMALLOC LD_ PYTHON GCONV_ LOCPATH
    TRANSFORMERS_ TOKENIZERS_ RAYON_ SAFETENSORS_ HF_ HUGGINGFACE_ HUGGING_FACE_ USE_ ACCELERATE_ COMPRESSED_TENSORS_
    TIKTOKEN_ DATA_GYM_ LLGUIDANCE_ XGRAMMAR_ OUTLINES_ PYDANTIC_ PYZMQ_ FLASH MODELSCOPE_ TILELANG_ TVM_ DG_ FLYDSL_
    NCCL_ GLOO_ UCX_ CCL_ EP_ NVSHMEM_ ROCSHMEM_ MORI_ LMCACHE_ MOONCAKE_ RUNAI_ TENSORIZER_ RAY_
    CUDA CUBLAS CUDNN NVIDIA NVCC_ NVTOOLS HIP_ ROCM_ ROCR_ HSA_ AITER_ GPU_ XLA_ JAX_ XPU_ ZE_ SYCL_ ONEAPI_ LEVEL_ZERO_ NPU_
    ASCEND_ HCCL_ INKLING_ LAMPORT_ GDN_ FORCE_NUM_ XHS_
"""
_FAMILIES = tuple(_FAMILIES_TEXT.split())
_NAMES_TEXT = """
    CC CXX CFLAGS CPPFLAGS CPLUS_INCLUDE_PATH MAX_JOBS LOCAL_RANK LOCAL_WORLD_SIZE RANK WORLD_SIZE ROLE_RANK MASTER_ADDR
    MASTER_PORT MAST_HPC_JOB_NAME VERBOSE CMAKE_BUILD_TYPE TRUST_REMOTE_CODE SM_FRAMEWORK_MODULE EAGER_IMPORT
    _SPLITTER_MERGE_OVERLAPPING_FUSIONS CI LOGLEVEL LOG_LEVEL S3_ENDPOINT_URL AWS_ENDPOINT_URL
"""
_NAMES = frozenset(_NAMES_TEXT.split())
_PLACE = "where files lie, not what they hold; the server reads its own"
_SAID = "what is logged or counted, not what is computed"
_AGAIN = "read again by the server itself, after it was forked"
IRRELEVANT: Mapping[str, str] = {
    "VLLM_CACHE_ROOT": _PLACE,
    "TORCHINDUCTOR_CACHE_DIR": _PLACE,
    "TRITON_CACHE_DIR": _PLACE,
    "FLASHINFER_WORKSPACE_BASE": _PLACE,
    "DG_JIT_CACHE_DIR": _PLACE,
    "VLLM_RPC_BASE_PATH": _PLACE,
    "PYTHONPYCACHEPREFIX": _PLACE,
    "VLLM_NO_USAGE_STATS": _SAID,
    "VLLM_DO_NOT_TRACK": _SAID,
    "PYTHONDONTWRITEBYTECODE": "whether modules are compiled anew, not what they do",
    "PYTHONUNBUFFERED": _SAID,
    "VLLM_CPU_OMP_THREADS_BIND": _AGAIN,
    "VLLM_CPU_NUM_OF_RESERVED_CPU": _AGAIN,
    "GLOO_SOCKET_IFNAME": "a group of one connects to nobody",
    "VLLM_WORKER_MULTIPROC_METHOD": "the engine is forked whatever it says",
}
# What a process needs to run at all, and what its users expect it to know. None of it enters what is computed.
_PASSED_TEXT = """
    PATH HOME USER LOGNAME SHELL TMPDIR TZ LANG LANGUAGE VIRTUAL_ENV CONDA_PREFIX SSL_CERT_FILE SSL_CERT_DIR
    XDG_CACHE_HOME XDG_CONFIG_HOME XDG_STATE_HOME XDG_DATA_HOME XDG_RUNTIME_DIR COLDSTART_CACHE_DIR COLDSTART_CRIU
    COLDSTART_TIMELINE_EVENTS NO_COLOR FORCE_COLOR
"""
PASSED = frozenset(_PASSED_TEXT.split())


def counts(name: str) -> bool:
    """Whether a variable could have been read by what a kept process has built."""
    return (
        (name.startswith(_FAMILIES) or name in _NAMES)
        and not IRRELEVANT.get(name)
        and not secrets.named(name)
    )


def kept(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of `environment` that a process which is kept, forked or frozen may have."""
    return secrets.harmless(environment, filter(_may_pass, environment))


def spawned(environment: Mapping[str, str], plan: LaunchPlan) -> dict[str, str]:
    """The whole environment of a process that is kept, started from `environment` for `plan`."""
    return kept(environment) | redact_plan(plan).env


def redact_plan(plan: LaunchPlan) -> LaunchPlan:
    """Return `plan` without secret arguments and variables, and without a weights source that has credentials in its URL."""
    kept_env, request = secrets.harmless(plan.env, plan.env), plan.weights_from
    if request is not None and secrets.text(request.source, plan.env) != request.source:
        request = None
    given = Arguments(secrets.without(plan.vllm_args))
    return replace(plan, vllm_args=given, env=kept_env, weights_from=request)


def _may_pass(name: str) -> bool:
    return name in PASSED or name.startswith("LC_") or name in IRRELEVANT or counts(name)


def counted(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that must be equal, with their values."""
    return {name: value for name, value in sorted(environment.items()) if counts(name)}


def difference(recorded: Mapping[str, str], wanted: Mapping[str, str], what: str) -> str | None:
    """Why `what`, made under the counted environment `recorded`, cannot serve under `wanted`; None where it can."""
    names: Iterable[str] = sorted({*recorded, *counted(wanted)})
    for name in names:
        if recorded.get(name) != wanted.get(name):
            return f"{name}: the {what} was made with {_shown(recorded.get(name))}, this start has {_shown(wanted.get(name))}"
    return None


def _shown(value: str | None) -> str:
    return "none" if value is None else repr(secrets.text(value))
