"""Build the sections of a bundle: run the engine offline, hash the weights, and verify the result with a test start."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import coldstart
from coldstart.artifacts import canonical
from coldstart.artifacts.manifest import Provenance
from coldstart.artifacts.writer import BundleDraft
from coldstart.contract import fallback
from coldstart.contract.arguments import Arguments
from coldstart.contract.environment import SUPERVISOR_PID, TIMELINE_EVENTS, VLLM_SERVER_DEV_MODE
from coldstart.contract.graphs import EngineTask
from coldstart.contract.plan import READY_FD_ENV, LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.graphs import offline
from coldstart.graphs.errors import GraphError
from coldstart.launch import caches, fetch, prepare, server, server_process
from coldstart.materialize.options import Phase, Steps
from coldstart.models.inspection import NOT_MADE, PROOF_FAILED
from coldstart.models.resolution import ResolvedModel
from coldstart.scheduling import profiling
from coldstart.system import runtime, secrets, timeline
from coldstart.system.devices import nvml, parking
from coldstart.system.devices.nvml import PeakMemory
from coldstart.system.proc import exits, processes
from coldstart.system.proc.scratch import PROOF, private_directory, use_scratch_directory
from coldstart.system.start_progress import ProgressText, StartProgress
from coldstart.system.timeline import Timeline
from coldstart.vllm.engine.sleeping import ParkedEngine, RemoteEngine
from coldstart.weights import weights_plan as weights

# Sections that a start restores and that can make the test start fail, the most likely cause first.
_RESTORED = ("graphs", "compile")
# Largest share of a start without graphs that a start with them may take to count as shorter: starts differ by some percent.
_SHORTER = 0.95
# Bytes of each GPU by which a KV cache may miss its size: vLLM's share of a GPU is rounded, and so is the number of blocks.
_ROUNDING = 64 << 20
# Seconds within which the server of a test start must go to sleep.
_SLEEP_S = 600.0


class VerificationFailedError(CommandFailedError):
    """Error for a failed test start. `unused` contains the bundle sections that the start did not use."""

    def __init__(self, message: str | Sequence[str], unused: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.unused = unused


def require_fast_path(report: Any, sections: Sequence[str], *, canary: bool) -> None:
    """Raise VerificationFailedError unless the test start used all `sections` and returned the reference token."""
    if unused := [name for name in sections if not report["fast_path"].get(name)]:
        reasons = "; ".join(map(str, fallback.decode_fallbacks(report["fallbacks"])))
        raise VerificationFailedError(
            f"the start that verifies the new bundle used fallbacks ({reasons or 'no reason'}), so nothing was published",
            unused,
        )
    if canary and not report.get("canary"):
        raise VerificationFailedError(
            "the start that verifies the new bundle returned a token that differs from the reference, so nothing was published"
        )


def _explain_no_graphs(vllm_args: Arguments) -> str | None:
    """Return the reason why an engine with these arguments has no CUDA graphs to record, or None if it has any."""
    if runtime.targets_cpu():
        return "the installed vLLM runs on the CPU, which has no CUDA graphs to materialize"
    if vllm_args.get_value("enforce_eager") not in (None, False):
        return "with --enforce-eager the engine captures no CUDA graphs to materialize"
    if any(vllm_args.get_integer(name, 1) > 1 for name in ("tensor_parallel_size", "pipeline_parallel_size")):
        return "graphs of several ranks contain collectives, whose state cannot be restored: every start captures them again"
    return None


def build_graphs_section(
    target: Path, work: Path, launch: offline.Launch, vllm_args: Arguments
) -> str | None:
    """Write the `graphs` section to the new directory `target`. Return None, or the reason why there is no such section.

    If the graphs cannot be restored, the rest of the bundle is still valid.
    """
    if reason := _explain_no_graphs(vllm_args):
        return reason
    work.mkdir()
    try:
        offline.run_offline_phase(work, launch).rename(target)
    except (GraphError, CommandFailedError) as error:
        return f"every start captures its CUDA graphs: {error}"
    return None


def choose_kv_cache_arguments(sizing: Mapping[str, object], vllm_args: Arguments) -> list[str]:
    """Return the vLLM arguments that give all recording processes the same KV cache size, or none if the user has set it.

    Memory regions of different sizes cannot be compared.
    """
    if vllm_args.contains_flag("kv_cache_memory_bytes"):
        return []
    plans = sizing.get("plans")
    # This is the size in a start from the bundle, whose plan leaves a different margin than vLLM's profiling.
    size = plans[0]["kv_cache_memory_bytes"] if isinstance(plans, list) and plans else sizing["bytes"]
    return ["--kv-cache-memory-bytes", str(size)]


def _post(place: Path, path: str, body: bytes) -> bytes:
    """Send a POST request to the Unix socket `place`, and return the body of the response. Raises OSError or HTTPException."""
    with closing(HTTPConnection("server")) as connection, socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_SLEEP_S)
        sock.connect(str(place))
        connection.sock = sock
        connection.request("POST", path, body)
        response = connection.getresponse()
        content = response.read()
    if response.status != 200:
        raise ConnectionError(f"POST {path} returned HTTP status {response.status}")
    return content


class Assembly:
    """Build stages of one bundle in a work directory. `out` contains the finished sections."""

    def __init__(
        self, model: ResolvedModel, vllm_args: Arguments, key: str, work: Path, phase: Phase, *,
        profile_s: float = profiling.BUDGET_S, records: Path | None = None,
    ) -> None:  # fmt: skip
        self.model, self.vllm_args, self.key = model, vllm_args, key
        self.work, self.phase = work, phase
        self.out = work / "out"
        self.out.mkdir()
        self.seconds: dict[str, float] = {}
        self.profile_s = profile_s
        self.records = records
        self.not_made: dict[str, str] = {}
        self._say: Steps = lambda step: None

    def run(self, *, with_graphs: bool = True) -> None:
        """Run all stages in order. Raises CommandFailedError if the engine or the test start fails."""
        self.run_offline()
        self.hash_weights()
        if with_graphs:
            self.record_graphs()
        self.verify_by_start()

    def run_offline(self) -> None:
        """Run the engine in a child process with empty caches, and write its results to `out`."""
        env = prepare.build_base_env(self.work / "vllm")
        env |= prepare.build_inductor_env(self.work / "unused")
        if not runtime.targets_cpu():
            env |= caches.build_environment(self.work / "caches")
        plan = LaunchPlan(self._arguments(), key=self.key, env=env)
        with self._stage("run the engine offline"):
            self._engine("offline", plan, str(self.out), str(self.profile_s))
        if (self.out / f"{NOT_MADE}.json").exists():
            self.not_made |= self._read(NOT_MADE)
        if not runtime.targets_cpu():
            self._profile_kv_cache(plan)
            caches.collect_caches(self.work / "caches", self.work / "vllm", self.out / "compile")

    def _arguments(self, *words: str) -> Arguments:
        return self.vllm_args.prepend_model(str(self.model.path), self.model.name).prepend(*words)

    def _profile_kv_cache(self, plan: LaunchPlan) -> None:
        """Profile the KV cache again on a GPU with warm caches, because compilation used memory during the first profile."""
        notes = self.work / "kv"
        notes.mkdir()
        with self._stage("size the KV cache, warm"):
            self._engine("offline", replace(plan, engine=EngineTask(kv_note=notes)), str(self.out), "size")

    def record_graphs(self) -> None:
        """If the engine captures CUDA graphs, record them in child processes and verify them in another child process."""
        reason = build_graphs_section(
            self.out / "graphs", self.work / "graphs", self._graphs_round, self.vllm_args
        )
        if reason:
            self.not_made["graphs"] = reason

    def _graphs_round(self, name: str, task: EngineTask) -> None:
        env = prepare.build_base_env(self.work / "vllm")
        env |= caches.build_environment(self.work / "caches")
        arguments = self._arguments().append(*choose_kv_cache_arguments(self._read("kv"), self.vllm_args))
        with self._stage(name):
            self._engine(
                "offline", LaunchPlan(arguments, key=self.key, env=env, engine=task), str(self.out), "task"
            )

    def _engine(self, module: str, plan: LaunchPlan, *arguments: str) -> None:
        """Run a module of the engine package with `plan` in a child process. Raises CommandFailedError if it fails."""
        log = self.work / f"{module}.log"
        # vLLM does not remove its files in the temporary directory.
        with log.open("wb") as sink, use_scratch_directory():
            # A parent that is killed before the child has asked for a signal sends none: the child compares its parent.
            process, reader = server_process.spawn_engine_module(
                module,
                plan,
                lambda file, writer: [f"/proc/self/fd/{file}", *arguments],
                sink,
                env=os.environ
                | {SUPERVISOR_PID: str(os.getpid()), TIMELINE_EVENTS: str(self.locate_events(module))},
                variable=READY_FD_ENV,
            )
            child = server_process.ChildServer(process)
            try:
                server_process.await_readiness(child, reader, timeline.now(), None, self._show)
                child.wait()
            except server_process.ServerExitedError as error:
                if error.cause is not None and error.cause.is_final:
                    raise error.cause.build_error(CommandFailedError) from error
                cause = [f"vLLM failed: {error.cause.message}"] if error.cause else []
                ended = exits.describe_exit(error.code or 0)
                end = f"the offline run of the engine {ended}; the end of its log:"
                raise CommandFailedError([*cause, end, *exits.read_log_tail(log).splitlines()]) from error
            finally:
                server.end(child, 0.0)

    def hash_weights(self) -> None:
        """Hash the weights into a weights plan, write it as a section, and store its digest in `modelinfo`."""
        assert self.model.path is not None  # ensure_weights has set it
        with self._stage("hash the weights"):
            plan = weights.build_plan(self.model.path, self.records)
        self._write("weights", plan)
        info = self._read("modelinfo")
        info["weights"] = weights.compute_digest(plan)
        self._write("modelinfo", info)

    def verify_by_start(self) -> None:
        """Verify the sections with a test start, which must use all of them and return the reference token.

        Its phases, time to ready and memory become the section `stages`, which fleet and eviction policies read.
        """
        with self._stage("verify with a test start"):
            phases = self._verify_repeatedly()
        self._write("stages", phases | ({NOT_MADE: self.not_made} if self.not_made else {}))

    def drop_slow_graphs(self) -> None:
        """Start with the graphs and without them, and drop them unless the start with them is measurably shorter.

        The test start has warmed the page cache for both. Raises CommandFailedError if a start fails.
        """
        section = self.out / "graphs"
        if not section.is_dir():
            return
        with self._stage("compare starts with and without graphs"):
            kept, seconds = self.work / "compared-graphs", list[float]()
            for is_used in (True, False):
                self._remove_copies()
                if not is_used:
                    section.rename(kept)
                found = self._run_test_start(sized=True)
                seconds.append(found["ready_s"])
        if seconds[0] < _SHORTER * seconds[1]:
            kept.rename(section)
            return
        self.not_made["graphs"] = f"a start took {seconds[0]:.1f} s with them and {seconds[1]:.1f} s without"
        self._write("stages", found | {NOT_MADE: self.not_made})

    def _verify_repeatedly(self) -> dict[str, Any]:
        """Repeat the test start until it succeeds. After each failure, drop an unused section or else the likeliest cause."""
        while True:
            try:
                return self._run_test_start()
            except CommandFailedError as error:
                present = [name for name in _RESTORED if (self.out / name).is_dir()]
                if not present:
                    raise
                unused = getattr(error, "unused", ())
                section = next((name for name in present if name in unused), present[0])
                self.not_made[section] = f"{PROOF_FAILED}: {error.message}"
                shutil.rmtree(self.out / section, ignore_errors=True)
                self._remove_copies()

    def _remove_copies(self) -> None:
        for name in ("moved-graphs", "moved", "proof-caches", "proof-vllm"):
            shutil.rmtree(self.work / name, ignore_errors=True)
        self.locate_events("proof").unlink(missing_ok=True)

    def _run_test_start(self, *, sized: bool = False) -> dict[str, Any]:
        """Start from copies of the sections. With `sized`, the KV cache has the size of a start with graphs."""
        info = self._read("modelinfo")
        environment = {TIMELINE_EVENTS: str(self.locate_events("proof"))}
        sleeps = not runtime.targets_cpu() and self.vllm_args.contains_flag("enable_sleep_mode")
        environment |= {VLLM_SERVER_DEV_MODE: "1"} if sleeps else {}
        # The path is short, because the path of a Unix socket can have at most 107 bytes.
        with (
            (self.work / "proof.log").open("wb") as log,
            private_directory(PROOF) as directory,
        ):
            plan, began = self._plan_test_start(directory / "socket", sized=sized), timeline.now()
            process, reader = server_process.start_fresh(
                replace(plan, env=plan.env | environment), output=log
            )
            try:
                with PeakMemory(process.pid) as device:
                    running = server_process.await_readiness(process, reader, began, None, self._show)
                sections = [name for name in ("compile", "graphs") if (self.out / name).is_dir()]
                require_fast_path(running.report, sections, canary="canary" in info)
                memory = processes.measure_pss_bytes(processes.list_tree(process.pid))
                asleep = self._measure_asleep(directory / "socket", device) if sleeps else {}
            except CommandFailedError as error:
                tail = exits.read_log_tail(self.work / "proof.log").splitlines()
                lines = [f"{error.message}; the end of its log:", *tail]
                raise VerificationFailedError(lines, getattr(error, "unused", ())) from error
            finally:
                process.signal(signal.SIGTERM)
                process.wait()
        return {
            "ready_s": running.ready_s,
            "memory_bytes": memory,
            # What a host or a fleet reserves on the device. vLLM's CPU build holds nothing there.
            "device_bytes": None if runtime.targets_cpu() else device.peak_bytes,
            **({} if runtime.targets_cpu() else self._count_needs(device.peak_bytes)),
            **asleep,
            "spans": Timeline.read(self.locate_events("proof")).sum_phases(),
            "offline_spans": Timeline.read(self.locate_events("offline")).sum_phases(),
        }

    def _count_needs(self, peak_bytes: int | None) -> dict[str, int]:
        """Return the bytes that a server needs on its GPUs at least: for weights, for its KV cache, and for everything.

        `device_floor_bytes` is missing if a smaller share of the GPU would not make the KV cache smaller. `peak_bytes` are
        those of the test start.
        """
        sizing = self._read("kv")
        ranks, plans = sizing.get("ranks", []), sizing.get("plans", [])
        needs = {name: sum(rank[name] for rank in ranks) for name in ("weights_bytes", "kv_floor_bytes")}
        # All ranks get the same share of their GPUs, so the one that needs most decides.
        spare = [
            plan["kv_cache_memory_bytes"] - rank["kv_floor_bytes"] - _ROUNDING
            for plan, rank in zip(plans, ranks, strict=False)
        ]
        if peak_bytes and spare and min(spare) > 0:
            needs["device_floor_bytes"] = peak_bytes - len(ranks) * min(spare)
        return needs

    def _measure_asleep(self, place: Path, device: PeakMemory) -> dict[str, int | None]:
        """Return the device memory in bytes of the server at the socket `place` while it sleeps and while it is parked.

        The first figure that cannot be measured is missing, with those after it, and the bundle contains the reason.
        """
        sizes: dict[str, int | None] = {}
        try:
            asyncio.run(self._sleep_and_park(place, device, sizes))
        except Exception as error:  # noqa: BLE001 - the bundle is valid without these figures
            self.not_made["parked_bytes" if sizes else "asleep_bytes"] = str(error) or type(error).__name__
        return sizes

    async def _sleep_and_park(self, place: Path, device: PeakMemory, sizes: dict[str, int | None]) -> None:
        engine = RemoteEngine(lambda path, body: asyncio.to_thread(_post, place, path, body))
        await engine.sleep(1)
        sizes["asleep_bytes"] = device.read_current_bytes()
        limit = parking.find_engine_limit(self.vllm_args)
        if limit := limit or parking.find_limit(nvml.read_driver_version()):
            raise parking.ParkingError(limit[0])
        parked = await ParkedEngine.find(engine)
        try:
            if reason := await parked.park():
                raise parking.ParkingError(reason)
            sizes["parked_bytes"] = device.read_current_bytes()
            await parked.unpark()  # a parked engine does not react to SIGTERM
        finally:
            await parked.close()

    def _show(self, figures: StartProgress) -> None:
        self._say(ProgressText(figures.describe()))

    def _plan_test_start(self, socket: Path, *, sized: bool = False) -> LaunchPlan:
        info, compile_dir, task = self._read("modelinfo"), self.out / "compile", EngineTask()
        env = prepare.build_base_env(self.work / "vllm")
        args = self._arguments(*fetch.build_loader_arguments(self.vllm_args, self.model)).append(
            "--uds", str(socket)
        )
        has_graphs = (self.out / "graphs").is_dir()
        if has_graphs or sized:
            args = args.append(*choose_kv_cache_arguments(self._read("kv"), self.vllm_args))
        if has_graphs:
            task = EngineTask(restore=shutil.copytree(self.out / "graphs", self.work / "moved-graphs"))
        used = None
        if compile_dir.is_dir():
            # A copy at another path proves that the bundle works after a move.
            moved = shutil.copytree(compile_dir, self.work / "moved")
            if runtime.targets_cpu():
                env, used = env | prepare.build_inductor_env(moved), str(moved)
            else:
                # Use separate caches, so that the start can use nothing but the bundle.
                env |= {"VLLM_CACHE_ROOT": str(self.work / "proof-vllm")}
                prepare.write_modelinfos(info, Path(env["VLLM_CACHE_ROOT"]))
                laid = caches.copy_section(moved, self.work / "proof-caches")
                env, task = env | caches.build_environment(laid), replace(task, compiled=laid / caches.AOT)
        return LaunchPlan(
            args, key=self.key, compile_dir=used, canary=info.get("canary"), env=env, engine=task
        )

    def add_section(self, draft: BundleDraft, name: str) -> None:
        """Add one section to the draft, if it was built."""
        path = self.out / name
        if path.is_dir():
            draft.add_tree(name, path)
        elif path.with_suffix(".json").exists():
            draft.add_json(name, self._read(name))

    def build_provenance(self) -> Provenance:
        """Return the build record: tool versions, arguments, model name and the duration of each stage in seconds."""
        distribution, version = runtime.find_vllm_distribution() or ("vllm", "unknown")
        tool = {
            "coldstart": coldstart.__version__,
            distribution: version,
            "torch": runtime.read_torch_build()["__version__"],
        }
        return Provenance(
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            tool=tool,
            arguments=tuple(secrets.redact_arguments(self.vllm_args)),
            seconds={name: round(value, 3) for name, value in self.seconds.items()},
            model_name=self.model.name,
        )

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start = timeline.now()
        with self.phase(name) as self._say:
            yield
        self.seconds[name] = timeline.now() - start

    def locate_events(self, name: str) -> Path:
        """Return the path to which a child process writes its timeline events."""
        return self.work / f"{name}.events"

    def _read(self, name: str) -> dict[str, Any]:
        return dict(canonical.read_json(self.out / f"{name}.json"))

    def _write(self, name: str, value: object) -> None:
        (self.out / f"{name}.json").write_text(json.dumps(value, sort_keys=True))
