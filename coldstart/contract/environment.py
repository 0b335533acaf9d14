"""Every environment variable that this package reads: its name, type, default and meaning. Standard library only.

A Variable is its own name, so that it can be the key of any environment. Invariant: no other module spells a name that begins
with COLDSTART_, and none reads a foreign variable that is not here; docs/environment.md is this table.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Generic, Literal, TypeVar

    T = TypeVar("T")
    Audience = Literal["user", "internal", "foreign"]

    class _Name(str, Generic[T]): ...
else:  # every process of a start reads this module: `typing` would take longer than all the rest

    class _Name(str):
        def __class_getitem__(cls, _: object) -> type[str]:
            return cls


# Options of the command line have a variable each: COLDSTART_<COMMAND>_<OPTION>; each command's --help names its own.
PREFIX = "COLDSTART"


class Variable(_Name["T"]):
    """The name of a variable, and how to read it. `audience` says who sets it: the user, coldstart for its own processes, or
    other software.
    """

    audience: Audience
    about: str
    default: T
    kind: str
    _parse: Callable[[str], T]

    def __new__(
        cls, name: str, parse: Callable[[str], T], default: T, audience: Audience, about: str
    ) -> Variable[T]:
        """A variable that is `default` where it is unset or empty."""
        made = super().__new__(cls, name)
        made._parse, made.default, made.audience, made.about = parse, default, audience, about
        made.kind = parse.__name__.lstrip("_")
        return made

    def read(self, environment: Mapping[str, str] | None = None) -> T:
        """Its value in `environment`, by default this process's. Raises ValueError naming it for one that is none."""
        text = (os.environ if environment is None else environment).get(self, "")
        try:
            return self._parse(text) if text else self.default
        except ValueError as error:
            raise ValueError(f"{self!s} is {text!r}, wanted {error}") from error

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # a copy, or what another process gets, is the name alone


def text(value: str) -> str:
    """Any text."""
    return value


def flag(value: str) -> bool:
    """Only 1 is true."""
    return value == "1"


def number(least: float = float("-inf")) -> Callable[[str], float]:
    """A finite number of at least `least`."""

    def number(value: str) -> float:
        wanted = "a number" if least == float("-inf") else f"a number of at least {least:g}"
        try:
            found = float(value)
        except ValueError:
            raise ValueError(wanted) from None
        if not least <= found < float("inf"):
            raise ValueError(wanted)
        return found

    return number


def _mine(name: str, parse: Callable[[str], T], default: T, about: str) -> Variable[T]:
    return Variable(f"{PREFIX}_{name}", parse, default, "user", about)


def _ours(name: str, parse: Callable[[str], T], default: T, about: str) -> Variable[T]:
    return Variable(f"{PREFIX}_{name}", parse, default, "internal", about)


def _theirs(name: str, about: str) -> Variable[str]:
    return Variable(name, text, "", "foreign", about)


CACHE_DIR = _mine(
    "CACHE_DIR", text, "", "Root of bundles and built models; default: $XDG_CACHE_HOME/coldstart."
)
CONFIG = _mine("CONFIG", text, "", "Configuration file; default: $XDG_CONFIG_HOME/coldstart/config.toml.")
DEBUG = _mine("DEBUG", flag, False, "1: an error of coldstart itself is shown with its traceback.")
CRIU = _mine("CRIU", text, "", "The CRIU program; default: `criu` on the PATH.")
GRAPHS_CANARY = _mine(
    "GRAPHS_CANARY",
    text,
    "1",
    "0: no restored graph is replayed on its stored input first; all: every one is.",
)
PREFETCH_MEMORY_BYTES = _mine(
    "PREFETCH_MEMORY_BYTES",
    number(0),
    -1.0,
    "What the prefetcher may hold; default: half of the free memory.",
)
PREFETCH_STREAMS = _mine("PREFETCH_STREAMS", number(1), 4.0, "Connections by which the prefetcher reads.")
PREFETCH_IDLE_S = _mine("PREFETCH_IDLE_S", number(0), 600.0, "Seconds without a client after which it ends.")
PREFETCH_PATIENCE_S = _mine(
    "PREFETCH_PATIENCE_S", number(0), 60.0, "Seconds for which a dead source is tried again."
)
PREFETCH_TOKEN = _mine("PREFETCH_TOKEN", text, "", "Bearer token for weights from an https source.")
HTTP_FLOOR = _mine(
    "HTTP_FLOOR",
    number(0),
    float(16 << 10),
    "Bytes a second below which a registry or weights server runs out of patience.",
)
HTTP_PATIENCE_S = _mine(
    "HTTP_PATIENCE_S", number(0), 30.0, "Seconds for which a registry or weights server may give nothing."
)
TOKEN_REALMS = _mine(
    "TOKEN_REALMS", text, "", "Further hosts that may be asked for a registry's token, separated by commas."
)
TIMELINE_EVENTS = _mine(
    "TIMELINE_EVENTS", text, "", "File to which every process of a start appends its spans."
)

# What a whole server is asked to do are typed members of the launch plan (contract.plan). Beside it stands only what is one
# process's: it is not known yet when the plan is made, or differs between processes of one plan.
PLAN = _ours("PLAN", text, "", "The launch plan, for the processes of a server.")
READY_FD = _ours("READY_FD", number(-1), -1.0, "Descriptor on which a server says that it is ready.")
SUPERVISOR_PID = _ours("SUPERVISOR_PID", text, "", "The process whose death ends the server.")
TIMELINE_OFFSET_S = _ours("TIMELINE_OFFSET_S", number(), 0.0, "What a thawed process's clock lacks.")

XDG_CACHE_HOME = _theirs("XDG_CACHE_HOME", "Where caches lie; default: ~/.cache.")
XDG_STATE_HOME = _theirs("XDG_STATE_HOME", "Where keys and trust lie; default: ~/.local/state.")
XDG_CONFIG_HOME = _theirs("XDG_CONFIG_HOME", "Where the configuration lies; default: ~/.config.")
XDG_RUNTIME_DIR = _theirs(
    "XDG_RUNTIME_DIR", "Where sockets lie; default: a directory in the system's temporary one."
)
CXX = _theirs("CXX", "The C++ compiler, part of the key of a CPU engine; default: g++.")
CUDA_VISIBLE_DEVICES = _theirs("CUDA_VISIBLE_DEVICES", "Which devices there are for this process.")
CUDA_DEVICE_ORDER = _theirs(
    "CUDA_DEVICE_ORDER", "PCI_BUS_ID: devices of several kinds are numbered by their place."
)
TMPDIR = _theirs("TMPDIR", "Where temporary files lie; default: /tmp.")
TERM = _theirs("TERM", "dumb: progress is printed as plain lines.")
DOCKER_CONFIG = _theirs("DOCKER_CONFIG", "Directory of registry credentials; default: ~/.docker.")
OPENAI_API_KEY = _theirs("OPENAI_API_KEY", "Key that trace-replay sends to its targets.")
HF_HOME = _theirs("HF_HOME", "Where the hub's downloads lie; default: $XDG_CACHE_HOME/huggingface.")
HF_TOKEN = _theirs("HF_TOKEN", "Token for weights from the hub.")
HF_ENDPOINT = _theirs("HF_ENDPOINT", "Another hub.")
AWS_ENDPOINT_URL = _theirs(
    "AWS_ENDPOINT_URL", "Another object store; every AWS_ variable is handed to the prefetcher."
)
AWS_ENDPOINT = _theirs("AWS_ENDPOINT", "The same, by its older name.")
PROMETHEUS_MULTIPROC_DIR = _theirs(
    "PROMETHEUS_MULTIPROC_DIR", "Where processes share counters; set for a server if unset."
)
VLLM_CPU_KVCACHE_SPACE = _theirs(
    "VLLM_CPU_KVCACHE_SPACE", "GiB for the CPU engine's KV cache; given, none is chosen."
)
VLLM_CPU_OMP_THREADS_BIND = _theirs(
    "VLLM_CPU_OMP_THREADS_BIND", "Cores of a CPU engine; given, none is reserved."
)
VLLM_CPU_NUM_OF_RESERVED_CPU = _theirs(
    "VLLM_CPU_NUM_OF_RESERVED_CPU", "Cores left to the scheduler; given, it stands."
)
VLLM_PP_LAYER_PARTITION = _theirs(
    "VLLM_PP_LAYER_PARTITION", "Layers by pipeline stage: which weights a node needs."
)
VLLM_CACHE_ROOT = _theirs("VLLM_CACHE_ROOT", "vLLM's cache; set for every start.")
TORCHINDUCTOR_CACHE_DIR = _theirs("TORCHINDUCTOR_CACHE_DIR", "The compiler's cache; set for every start.")

EVERY: tuple[Variable[object], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Variable)
)
_HEADINGS: dict[Audience, str] = {
    "user": "Yours to set",
    "foreign": "Other software's, read here",
    "internal": "Set by coldstart for its own processes: not yours to set",
}


def table() -> str:
    """docs/environment.md."""
    lines = [
        "# Environment variables",
        "",
        f"Every option of a command also has one: `{PREFIX}_<COMMAND>_<OPTION>`.",
    ]
    for audience, heading in _HEADINGS.items():
        lines += ["", f"## {heading}", "", "| name | type | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [_row(variable) for variable in EVERY if variable.audience == audience]
    return "\n".join(lines) + "\n"


def _row(variable: Variable[object]) -> str:
    default = variable.default
    shown = (
        "" if default in ("", -1.0, False) else f"{default:g}" if isinstance(default, float) else str(default)
    )
    return f"| `{variable!s}` | {variable.kind} | {shown} | {variable.about} |"


if __name__ == "__main__":
    print(table(), end="")
