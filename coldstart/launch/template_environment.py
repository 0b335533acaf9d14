"""Environment of templates and snapshots: the variables that they receive, and the variables that must match a start.

A template or snapshot reads its environment early: libraries read it when they are loaded, modules when they are
imported, and the worker when it is built. Two rules follow. A template receives only the variables listed here, so that
its memory contains no secret. A start must have the same value for every relevant variable; otherwise it reports the
first variable that differs.

A variable that belongs to a listed family is relevant unless `is_irrelevant` matches it. A secret is never relevant: no
template receives it, and code that needs a secret reads the server's own environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from coldstart.contract.arguments import Arguments
from coldstart.contract.environment import is_service_variable
from coldstart.contract.plan import LaunchPlan
from coldstart.system import secrets

# Prefixes of the variables of all software that a server loads.
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
# Variables of these families that do not affect what a template builds: file paths, logs and counters, addresses (a template
# has one rank and no connection), and variables that the server reads again after the fork (`reapply_environment`).
_IRRELEVANT = re.compile(
    r"VLLM_CACHE_ROOT|TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR|FLASHINFER_WORKSPACE_BASE|DG_JIT_CACHE_DIR"
    r"|VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR|VLLM_RPC_BASE_PATH"
    r"|PYTHONPYCACHEPREFIX|PYTHONDONTWRITEBYTECODE|PYTHONUNBUFFERED|COMPRESSED_TENSORS_LOG_DISABLED"
    r"|VLLM_(?:NO_USAGE_STATS|USAGE_SOURCE|USAGE_STATS_SERVER|DO_NOT_TRACK|SERVER_DEV_MODE)"
    r"|VLLM_(?:CPU_OMP_THREADS_BIND|CPU_NUM_OF_RESERVED_CPU|WORKER_MULTIPROC_METHOD|ENABLE_STARTUP_PLAN)"
    r"|(?:\w+_)?(?:HOST|HOSTNAME|IPS?|PORT|ADDR|ADDRESS|IFNAME)"
    r"|(?:\w+_)?LOG_?LEVEL|\w+_VERBOSITY|(?:\w+_)?DISABLE_PROGRESS_BARS|TORCH_LOGS(?:_\w+)?"
    r"|VLLM_(?:CONFIGURE_LOGGING|LOG(?:GING)?_\w+|DISABLE_LOG_LOGO|DEBUG_LOG_\w+)"
    r"|(?:HF|HF_HUB|HF_DATASETS|TRANSFORMERS)_OFFLINE"
)
# Variables that a process needs to run, or that users expect it to have. No result depends on them.
_PASSED_TEXT = """
    PATH HOME USER LOGNAME SHELL TMPDIR TZ LANG LANGUAGE VIRTUAL_ENV CONDA_PREFIX SSL_CERT_FILE SSL_CERT_DIR
    XDG_CACHE_HOME XDG_CONFIG_HOME XDG_STATE_HOME XDG_DATA_HOME XDG_RUNTIME_DIR COLDSTART_CACHE_DIR COLDSTART_CRIU
    COLDSTART_TIMELINE_EVENTS NO_COLOR FORCE_COLOR
"""
ALWAYS_ALLOWED = frozenset(_PASSED_TEXT.split())


def is_irrelevant(name: str) -> bool:
    """Return whether this variable cannot affect what a template builds, even if it belongs to a listed family."""
    return _IRRELEVANT.fullmatch(name) is not None


def _is_of_family(name: str) -> bool:
    return name.startswith(_FAMILIES) or name in _NAMES


def select_allowed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in `environment` that a template or snapshot may receive."""
    return secrets.select_harmless(environment, filter(_may_pass, environment))


def build_environment(environment: Mapping[str, str], plan: LaunchPlan) -> dict[str, str]:
    """Return the complete environment of a template that is started for `plan` in `environment`."""
    return select_allowed(environment) | redact_plan(plan).env


def redact_plan(plan: LaunchPlan) -> LaunchPlan:
    """Return `plan` without secret arguments and variables, and without a weights source whose URL contains credentials."""
    kept_env, request = secrets.select_harmless(plan.env, plan.env), plan.weights_from
    if request is not None and secrets.redact_text(request.source, plan.env) != request.source:
        request = None
    given = Arguments(secrets.drop_secret_options(plan.vllm_args))
    return replace(plan, vllm_args=given, env=kept_env, weights_from=request)


def _may_pass(name: str) -> bool:
    return name in ALWAYS_ALLOWED or name.startswith("LC_") or is_irrelevant(name) or _is_of_family(name)


def select_relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can affect what a template builds, and must be equal in a start from it."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if _is_of_family(name) and not is_irrelevant(name) and not secrets.is_secret_name(name)
        if not is_service_variable(name, value)
    }


def find_difference(recorded: Mapping[str, str], wanted: Mapping[str, str], what: str) -> str | None:
    """Return the reason why `what`, built with the variables `recorded`, does not fit the environment `wanted`, or None."""
    start = select_relevant(wanted)
    for name in sorted({*recorded, *start}):
        if recorded.get(name) != start.get(name):
            return (
                f"{name}: the {what} was created with {_shown(recorded.get(name))}, "
                f"but this start has {_shown(start.get(name))}"
            )
    return None


def _shown(value: str | None) -> str:
    return "none" if value is None else repr(secrets.redact_text(value))
