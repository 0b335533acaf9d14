"""What a server asks of the process that its engine is forked into."""

from __future__ import annotations

import signal
import subprocess
import sys

FORKED = """
import asyncio, ctypes, os
from argparse import Namespace
from types import SimpleNamespace

from vllm.v1.engine.async_llm import AsyncLLM

from coldstart.vllm.engine import server

def engine(*_, **__):
    if os.fork() == 0:
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
        print("dies by", number.value, flush=True)
        os._exit(0)
    os.wait()
    return SimpleNamespace(shutdown=lambda timeout: None)

async def main():
    args = Namespace(worker_cls="other", enable_log_requests=False, aggregate_engine_logging=False, disable_log_stats=True)
    async with server.engine_client(args, SimpleNamespace(must_adopt=False), True):
        pass

AsyncLLM.from_vllm_config = engine
logging = SimpleNamespace(pylogging_config_file="x")
server.configure = lambda args: SimpleNamespace(logging_config=logging, shutdown_timeout=0)
server.scheduler.settle = lambda *_: False
asyncio.run(main())
"""


def test_an_engine_that_is_just_forked_dies_with_its_server() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", FORKED], capture_output=True, text=True, check=False)
    assert f"dies by {signal.SIGKILL.value}\n" in done.stdout, done.stderr
