import json
import subprocess
import sys

from coldstart.scheduling.settings import SchedulerSettings
from coldstart.vllm.scheduling.arguments import serve_arguments


def flags(strategy: str, host_bytes: int | None) -> dict[str, str]:
    settings = SchedulerSettings(batch=4, strategy=strategy, host_bytes=host_bytes)
    given = serve_arguments(settings, on_cpu=True)
    return dict(zip(given[::2], given[1::2], strict=True))


def test_the_flags_carry_the_settings() -> None:
    found = flags("proactive", 1 << 20)
    settings = SchedulerSettings.read(json.loads(found["--additional-config"]))
    assert settings.batch == 4 and settings.host_bytes is None
    extra = json.loads(found["--kv-transfer-config"])["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 1 << 20 and extra["offload_prompt_only"] is False


def test_recomputation_needs_no_connector() -> None:
    assert "--kv-transfer-config" not in flags("recompute", 1 << 20)
    assert "--kv-transfer-config" not in flags("proactive", None)


def test_neither_the_policies_nor_the_flags_import_an_engine() -> None:
    code = (
        "import sys, coldstart.scheduling, coldstart.lab.plan, coldstart.lab.live;"
        "import coldstart.vllm.scheduling.arguments;"
        "sys.exit(bool({'torch', 'vllm', 'typer', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
