"""Build a launch plan from a bundle without importing torch or vLLM.

For each unusable section, `fallbacks` has an entry and vLLM does the work itself, so such a section never prevents a
start.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, floor
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from coldstart.artifacts import files, ownership
from coldstart.artifacts.bundle import Bundle, TrustCheck
from coldstart.artifacts.errors import BundleError
from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback
from coldstart.contract.graphs import EngineTask
from coldstart.contract.plan import LaunchPlan
from coldstart.graphs.errors import GraphError
from coldstart.launch import caches, fetch
from coldstart.models import inspection
from coldstart.models.inspection import BundleLookup
from coldstart.system import paths, runtime
from coldstart.system.dry_run import is_dry_run
from coldstart.system.proc.processes import read_available_memory
from coldstart.system.trust.unpacked import unpack_section
from coldstart.units import format_memory

KV_FLAG = "kv_cache_memory_bytes"
# vLLM's own variable for the KV cache size of a CPU engine. If the user sets it, the bundle's size is not used.
KV_VARIABLE = environment.VLLM_CPU_KVCACHE_SPACE
# Bytes of memory that must remain free for the process in addition to the KV cache.
HEADROOM = 1 << 30
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.json")


def build_inductor_env(compile_dir: Path) -> dict[str, str]:
    """Return the Inductor environment variables that must be the same when kernels are built and when they are loaded.

    They set the vector ISA, which Inductor would otherwise detect with a compiler, and disable precompiled headers, whose
    path would become part of each kernel's cache key.
    """
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(compile_dir / "inductor"),
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }


def build_base_env(caches: Path) -> dict[str, str]:
    """Return the variables that place vLLM's caches in the directory `caches` and disable usage statistics."""
    return {"VLLM_CACHE_ROOT": str(caches), "VLLM_NO_USAGE_STATS": "1"}


def plan_without_bundle(lookup: BundleLookup, weights: fetch.ServerWeights, reason: str) -> LaunchPlan:
    """Build the plan of a start without a bundle. `reason` explains why there is none."""
    return LaunchPlan(
        weights.arguments,
        key=lookup.key.digest,
        weights=weights.identity,
        env=build_base_env(lookup.cache.vllm_cache_dir(lookup.key.digest)),
        weights_from=weights.request,
        fallbacks=[Fallback("bundle", reason)],
    )


def drop_restored_state(plan: LaunchPlan) -> LaunchPlan:
    """Return `plan` without the bundle's code and restored state. Its arguments and vLLM's own caches are kept."""
    restored = {*build_inductor_env(Path()), *caches.VARIABLES}
    env = {name: value for name, value in plan.env.items() if name not in restored}
    task = replace(plan.engine, restore=None, compiled=None)
    return replace(plan, compile_dir=None, canary=None, env=env, engine=task)


@dataclass
class _Preparation:
    bundle: Bundle
    trust: TrustCheck
    root: Path
    fallbacks: list[Fallback] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    task: EngineTask = field(default_factory=EngineTask)

    def drop_section(self, section: str, reason: str, hint: str | None = None) -> None:
        self.fallbacks.append(Fallback(section, reason, hint))

    def read_section(self, section: str) -> dict[str, Any]:
        try:
            document = self.bundle.read_json(section)
        except BundleError as error:
            self.drop_section(section, f"{error.message} [{error.code}]", error.hint)
            return {}
        if not isinstance(document, Mapping):
            self.drop_section(section, "the section is not a JSON object")
            return {}
        return dict(document)

    def unpack_compiled(self) -> Path | None:
        """Unpack the `compile` section, which all starts share. Return its directory, or None after recording a fallback."""
        if not self.bundle.has_section("compile") and (
            why := inspection.list_missing_sections(self.bundle).get("compile")
        ):
            self.drop_section("compile", f"the bundle has no compiled code: {why}")
            return None
        return self.unpack_code("compile")

    def unpack_code(self, section: str) -> Path | None:
        """Unpack a section that contains code. Return its directory, or None after recording a fallback."""
        refused: list[str] = []
        try:
            return unpack_section(self.bundle, section, self.root, self.trust, refused)
        except BundleError as error:
            self.drop_section(section, f"{error.message} [{error.code}]", error.hint)
        except OSError as error:
            self.drop_section(section, f"cannot unpack the section: {error}")
        finally:
            for reason in refused:
                self.drop_section(section, reason)
        return None

    def create_compiler_caches(self, section: Path) -> None:
        """Copy the unpacked `compile` section to a writable directory for the compilers of a GPU engine."""
        root = paths.compiled_dir()
        laid = root / section.name
        if not is_dry_run() and (fault := ownership.ensure_private_directory(root)) is not None:
            self.drop_section("compile", f"cannot create the compiler caches: {fault}")
            return
        try:
            if not is_dry_run():
                caches.copy_section(section, laid)
        except OSError as error:
            self.drop_section("compile", f"cannot create the compiler caches: {error}")
            return
        self.env |= caches.build_environment(laid)
        self.task = replace(self.task, compiled=laid / caches.AOT)

    def choose_kv_args(self, given: Arguments, server: Arguments) -> list[str]:
        """Return the bundle's KV cache size as a vLLM argument, unless the user set a size or too little memory is free.

        `given` are the arguments of the bundle, and `server` those of the server, which may use less of its GPU.
        """
        if given.contains_flag(KV_FLAG) or KV_VARIABLE in os.environ:
            return []
        sizing = self.read_section("kv")
        if not sizing:
            return []
        wanted = sizing.get("bytes")
        if not isinstance(wanted, int) or wanted <= 0:
            self.drop_section("kv", f"invalid KV cache size {wanted!r}: expected a positive integer")
            return []
        if not runtime.targets_cpu():
            self.pass_kv_plans(sizing.get("plans"), given.gpu_memory_share(), server.gpu_memory_share())
            return []
        free = read_available_memory()
        if wanted + HEADROOM > free:
            needed, left = format_memory(wanted + HEADROOM), format_memory(free)
            self.drop_section(
                "kv", f"the bundle's KV cache needs {needed} with headroom, but only {left} are free"
            )
            return []
        return ["--kv-cache-memory-bytes", str(wanted)]

    def pass_kv_plans(self, data: object, planned: float, share: float) -> None:
        """Pass each GPU's KV cache size to its worker. It was planned for the share `planned` of the GPU.

        If this server may use less, its KV cache is that much smaller. Others then use the rest, so the worker needs only its
        `share` to be free, as vLLM does. Only a worker that starts compares the size with the free memory. A sleeping engine
        was sized when it started.
        """
        from coldstart.system.devices import nvml
        from coldstart.vllm.graphs import kv_plan

        gpus = nvml.list_gpus() if share < planned else []
        total = gpus[0].memory_bytes if gpus else 0
        unused, needed = ceil((planned - share) * total), floor(share * total)
        try:
            plans = [
                msgspec.structs.replace(
                    plan,
                    kv_cache_memory_bytes=plan.kv_cache_memory_bytes - unused,
                    free_memory_baseline=min(plan.free_memory_baseline, needed or plan.free_memory_baseline),
                )
                for plan in kv_plan.parse_plans(data)
            ]
        except GraphError as error:
            self.drop_section("kv", str(error))
            return
        self.task = replace(self.task, kv_plan=msgspec.to_builtins(plans))

    def unpack_graphs(self) -> None:
        """Unpack the `graphs` section if there is one. It counts as code, because it contains kernels."""
        if self.bundle.has_section("graphs") and (place := self.unpack_code("graphs")) is not None:
            self.task = replace(self.task, restore=place)

    def write_modelinfo(self, env: Mapping[str, str]) -> dict[str, Any]:
        """Write the model class descriptions to vLLM's cache, so that vLLM starts no process to inspect the model class.

        Return the `modelinfo` section, or an empty dict if the section cannot be used.
        """
        info = self.read_section("modelinfo")
        if info and not self.trust(self.bundle).is_trusted:
            # vLLM would use the files in every later start, even after the bundle is removed.
            self.drop_section("modelinfo", "the bundle has no trusted signature")
            return {}
        if not is_dry_run():
            write_modelinfos(info, Path(env["VLLM_CACHE_ROOT"]))
        return info


def write_modelinfos(info: Mapping[str, Any], cache_root: Path) -> None:
    """Write the `modelinfo` section to vLLM's cache under `cache_root`. Raises OSError if a file cannot be written."""
    for name, content in _select_texts(info.get("vllm_modelinfos")).items():
        target = cache_root / "modelinfos" / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(target, content.encode())


def plan_with_bundle(
    lookup: BundleLookup,
    bundle: Bundle,
    weights: fetch.ServerWeights,
    *,
    trust: TrustCheck,
) -> LaunchPlan:
    """Build the plan of a start from `bundle`. Raises OSError if the cache root cannot be written."""
    cache, key = lookup.cache, bundle.key_digest
    preparation = _Preparation(bundle, trust, cache.unpacked)
    env = build_base_env(cache.vllm_cache_dir(key))
    info = preparation.write_modelinfo(env)
    compile_dir = preparation.unpack_compiled()
    if compile_dir is not None and runtime.targets_cpu():
        env |= build_inductor_env(compile_dir)
    elif compile_dir is not None:
        preparation.create_compiler_caches(compile_dir)
        compile_dir = None  # on a GPU, vLLM's own worker reads the caches
    preparation.unpack_graphs()
    kv_args = preparation.choose_kv_args(lookup.vllm_args, weights.arguments)
    recorded = info.get("weights")
    canary = _canary(info.get("canary")) if weights.identity == recorded else None
    if recorded not in (None, weights.identity):
        reason = "the weights are not those of the bundle, so its token is not compared"
        preparation.drop_section("canary", reason, f"run `{lookup.format_command('materialize', '--force')}`")
    return LaunchPlan(
        Arguments((*weights.arguments, *kv_args)),
        key=key,
        weights=weights.identity,
        compile_dir=str(compile_dir) if compile_dir else None,
        canary=canary,
        env=env | preparation.env,
        weights_from=weights.request,
        engine=preparation.task,
        fallbacks=preparation.fallbacks,
    )


def _select_texts(value: object) -> dict[str, str]:
    pairs = value.items() if isinstance(value, Mapping) else ()
    return {k: v for k, v in pairs if isinstance(v, str) and _FILE_NAME.fullmatch(k)}


def _canary(value: object) -> dict[str, list[int]] | None:
    given = value if isinstance(value, Mapping) else {}
    lists = {name: given.get(name) for name in ("prompt", "tokens")}
    token_lists = {name: value for name, value in lists.items() if _is_token_list(value)}
    return token_lists if {"prompt", "tokens"} <= set(token_lists) else None


def _is_token_list(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
