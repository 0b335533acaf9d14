"""Phases in the log of vLLM 0.32."""

from coldstart.bench import vllm_log

LOG = """
(EngineCore pid=9) INFO 11-21 07:26:01 [default_loader.py:502] Loading weights took 0.25 seconds
(EngineCore pid=9) INFO 11-21 07:26:03 [monitor.py:60] torch.compile took 13.50 s in total
INFO [core.py:403] init engine (profile, create kv cache, warmup model) took 17.75 s (compilation: 13.50 s)
"""


def test_phases_do_not_overlap() -> None:
    assert vllm_log.phases(LOG) == {vllm_log.LOAD: 0.25, vllm_log.COMPILE: 13.5, vllm_log.INIT: 4.25}
