"""Fake engine processes for unit tests, called like the real ones: -m MODULE ARGUMENTS.

The template is the real one with fakes for `build` and `server.run`. FAKE_BEHAVIOUR selects the behaviour of a server.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

BEHAVIOUR = os.environ["FAKE_BEHAVIOUR"]
REPORT = {"fast_path": {"compile": True}, "fallbacks": [], "tokens": [1]}


def fail(error: Exception) -> None:
    """Report an error to the process that started this one, as the real server does."""
    from coldstart.vllm.engine import readiness

    readiness.report_failure(error)


def serve(plan, is_imported=False):  # type: ignore[no-untyped-def]
    """Replace `server.run`; the first entry of the plan's `vllm_args` selects the behaviour of this server."""
    from coldstart.system.proc.lifeline import die_with_parent

    die_with_parent()
    behaviour, *rest = plan.vllm_args or [BEHAVIOUR]
    if behaviour == "dies":
        sys.stderr.write("no memory for the engine\n")
        return 7
    if behaviour in ("dies-of", "loses-engine"):
        if behaviour == "dies-of":
            fail(ValueError("no space for the KV cache"))
        fail(Exception("a rank failed. See stack trace for root cause."))
        fail(RuntimeError("it failed. See root cause above."))
        return 1
    if behaviour == "loses-weights" and plan.weights_from:
        from coldstart.contract.weights import LostWeightsError

        fail(LostWeightsError("files, after 3 of 10 tensors: it does not match its digest"))
        fail(RuntimeError("the engine process failed"))
        return 1
    if path := plan.vllm_args.get_value("uds"):
        import socket

        # As vLLM does, which neither replaces an existing socket nor removes its own when it is killed.
        try:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
        except OSError as error:
            fail(error)
            return 1
    if behaviour == "dies-forked" and is_imported:
        return 7
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "says":
        print(Path.cwd(), os.environ.get("SAID"), sys.stdin.read(), flush=True)
    if behaviour == "draws":
        import multiprocessing
        import random

        import numpy

        print(
            random.random(),
            numpy.random.random(),
            multiprocessing.current_process().authkey.hex(),
            flush=True,
        )
    if behaviour == "unfit":
        os.write(int(os.environ["COLDSTART_READY_FD"]), b'{"unfit": "a leaf differs"}\n')
        return 1
    wrong = behaviour == "forgets" and plan.canary is not None
    if behaviour != "never-ready":
        descriptor = int(os.environ["COLDSTART_READY_FD"])
        report = REPORT | {"pid": os.getpid(), "args": rest, "canary": not wrong if plan.canary else None}
        os.write(descriptor, (json.dumps(report) + "\n").encode())
        os.close(descriptor)
    if wrong:
        return 1
    time.sleep(60)
    return 0


def template(arguments: list[str]) -> None:
    """Run the real template with a fake engine."""
    from coldstart.vllm.engine import server
    from coldstart.vllm.engine import template as real

    if BEHAVIOUR == "dies":
        sys.exit("no memory for the template")
    if BEHAVIOUR == "never-ready":
        time.sleep(60)
    if BEHAVIOUR.startswith("waits-for:"):
        while not Path(BEHAVIOUR.partition(":")[2]).exists():
            time.sleep(0.01)
    server.run = serve  # type: ignore[assignment]
    real.build_template = lambda plan, level: None  # type: ignore[assignment]
    real.SLEEP_LEVELS = {}  # the fake is forked at every level
    real.main(arguments)


def command(arguments: list[str]) -> None:
    """Report a ready server as `coldstart serve` does, and end at SIGTERM."""
    if BEHAVIOUR == "dies":
        sys.exit('{"error": "no memory for the engine", "hint": "use less", "exit_code": 1}')
    host, port = (arguments[arguments.index(name) + 1] for name in ("--host", "--port"))
    report = {"url": f"http://{host}:{port}", "pid": os.getpid(), "mode": "fresh", "ready_s": 0.0}
    report |= {"fallbacks": [], "absent": [], "tokens": [1], "longest_phase": None, "words": arguments}
    os.write(1, b"to stdout\n")
    os.write(2, b"to stderr\n")
    if BEHAVIOUR != "never-ready":
        os.write(int(os.environ["COLDSTART_READY_FD"]), (json.dumps(report) + "\n").encode())
    signal.pause()


def main() -> None:
    from coldstart.contract.plan import LaunchPlan

    _, module, *arguments = sys.argv[sys.argv.index("-m") :]
    if module == "coldstart.vllm.engine.template":
        template(arguments)
    elif module == "coldstart.commands.cli":
        command(arguments)
    else:
        sys.exit(serve(LaunchPlan.parse(Path(arguments[0]).read_text())))


main()
