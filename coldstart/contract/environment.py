"""All environment variables that coldstart reads: name, type, default and meaning. Standard library only.

A Variable is a string with the name of the variable, so it can be a key of any environment mapping. Invariant: no other
module contains a name that begins with COLDSTART_ or reads a third-party variable that is not listed here.
docs/_tools/environment.py generates the reference page from this table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
Audience = Literal["user", "internal", "foreign"]

# Each command-line option also has a variable COLDSTART_<COMMAND>_<OPTION>, which the command's --help shows.
PREFIX = "COLDSTART"


class Variable(str, Generic[T]):
    """Name of an environment variable, with its type, default and description.

    `audience` states who sets it: the user, coldstart for its own processes ("internal"), or other software ("foreign").
    """

    audience: Audience
    about: str
    default: T
    kind: str
    _parse: Callable[[str], T]

    def __new__(
        cls, name: str, parse: Callable[[str], T], default: T, audience: Audience, about: str
    ) -> Variable[T]:
        """Create a variable. `default` is the value if the variable is unset or empty, and `about` is the description."""
        variable = super().__new__(cls, name)
        variable._parse, variable.default, variable.audience, variable.about = parse, default, audience, about
        variable.kind = parse.__name__.lstrip("_")
        return variable

    def read(self, environment: Mapping[str, str] | None = None) -> T:
        """Return the parsed value from `environment` (default: os.environ). Raises ValueError if it is invalid."""
        text = (os.environ if environment is None else environment).get(self, "")
        try:
            return self._parse(text) if text else self.default
        except ValueError as error:
            raise ValueError(f"invalid value {text!r} of {self!s}: expected {error}") from error

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # copies and pickles contain the name only


def text(value: str) -> str:
    """Parse a string by returning it unchanged."""
    return value


def flag(value: str) -> bool:
    """Parse a boolean. Only "1" is true."""
    return value == "1"


def number(least: float = float("-inf")) -> Callable[[str], float]:
    """Return a parser for finite numbers that are at least `least`."""

    def number(value: str) -> float:
        expected = "a number" if least == float("-inf") else f"a number of at least {least:g}"
        try:
            parsed = float(value)
        except ValueError:
            raise ValueError(expected) from None
        if not least <= parsed < float("inf"):
            raise ValueError(expected)
        return parsed

    return number


def _user(name: str, parse: Callable[[str], T], default: T, about: str) -> Variable[T]:
    return Variable(f"{PREFIX}_{name}", parse, default, "user", about)


def _internal(name: str, parse: Callable[[str], T], default: T, about: str) -> Variable[T]:
    return Variable(f"{PREFIX}_{name}", parse, default, "internal", about)


def _foreign(name: str, about: str) -> Variable[str]:
    return Variable(name, text, "", "foreign", about)


CACHE_DIR = _user(
    "CACHE_DIR", text, "", "Directory of bundles and caches; default: $XDG_CACHE_HOME/coldstart."
)
DEBUG = _user("DEBUG", flag, False, "1: show the traceback of an internal error.")
CRIU = _user("CRIU", text, "", "Path of the CRIU program; default: `criu` on the PATH.")
SLEEP_MEMORY_BYTES = _user(
    "SLEEP_MEMORY_BYTES",
    number(0),
    -1.0,
    "Total host memory in bytes for the weights of all sleeping engines; default: half of the memory.",
)
PREFETCH_MEMORY_BYTES = _user(
    "PREFETCH_MEMORY_BYTES",
    number(0),
    -1.0,
    "Memory limit of the prefetcher in bytes; default: half of the free memory.",
)
PREFETCH_STREAMS = _user(
    "PREFETCH_STREAMS", number(1), 4.0, "Number of parallel connections of the prefetcher."
)
PREFETCH_IDLE_S = _user(
    "PREFETCH_IDLE_S", number(0), 600.0, "Seconds without a client after which the prefetcher exits."
)
PREFETCH_PATIENCE_S = _user(
    "PREFETCH_PATIENCE_S",
    number(0),
    60.0,
    "Seconds for which the prefetcher retries a source that does not respond.",
)
PREFETCH_TOKEN = _user("PREFETCH_TOKEN", text, "", "Bearer token for weights from an https source.")
HOST_URL = _user(
    "HOST_URL",
    text,
    "",
    "URL of the host for `coldstart host status`, `load`, `unload`, `logs`, `reload` and `stop`.",
)
HTTP_PATIENCE_S = _user(
    "HTTP_PATIENCE_S",
    number(0),
    30.0,
    "Seconds without data after which a registry or weights transfer is aborted.",
)
TOKEN_REALMS = _user(
    "TOKEN_REALMS", text, "", "Additional hosts that may issue a registry's token, separated by commas."
)
TIMELINE_EVENTS = _user(
    "TIMELINE_EVENTS", text, "", "File to which all processes of a server start append their timeline spans."
)

# Instructions for a complete server are typed members of the launch plan (contract.plan). The variables here belong to one
# process: their values are unknown when the plan is created, or differ between processes with the same plan.
PLAN = _internal("PLAN", text, "", "The launch plan, for the processes of a server.")
READY_FD = _internal(
    "READY_FD",
    number(-1),
    -1.0,
    "Descriptor on which a server reports the progress of its start and readiness.",
)
HANDOVER_KEY = _internal(
    "HANDOVER_KEY",
    text,
    "",
    "Key that signs the messages that move the KV cache of a request to or from this server.",
)
WEIGHTS_SOCKET = _internal(
    "WEIGHTS_SOCKET", text, "", "Socket at which a rank shares its weights with the worker that replaces it."
)
SUPERVISOR_PID = _internal("SUPERVISOR_PID", text, "", "PID of the process whose exit ends the server.")
TIMELINE_OFFSET_S = _internal(
    "TIMELINE_OFFSET_S", number(), 0.0, "Seconds to add to the clock of a thawed process."
)

NIXL = _user(
    "NIXL", flag, False, "1: move the KV of streams with NIXL between servers that both have it and RDMA."
)
SHARE_GPU_WEIGHTS = _user(
    "SHARE_GPU_WEIGHTS",
    flag,
    False,
    "1 for `fleet deploy`: on GPUs, a rank shares weights with the worker that replaces it. Not run on a GPU yet.",
)
XDG_CACHE_HOME = _foreign("XDG_CACHE_HOME", "Directory of caches; default: ~/.cache.")
XDG_STATE_HOME = _foreign("XDG_STATE_HOME", "Directory of keys and trust settings; default: ~/.local/state.")
XDG_RUNTIME_DIR = _foreign(
    "XDG_RUNTIME_DIR", "Directory of sockets; default: a directory in the system's temporary directory."
)
CXX = _foreign("CXX", "C++ compiler, part of the key of a CPU engine; default: g++.")
CUDA_VISIBLE_DEVICES = _foreign("CUDA_VISIBLE_DEVICES", "Devices that this process can use.")
CUDA_DEVICE_ORDER = _foreign("CUDA_DEVICE_ORDER", "PCI_BUS_ID: number the devices by their PCI bus ID.")
TMPDIR = _foreign("TMPDIR", "Directory of temporary files; default: /tmp.")
TERM = _foreign("TERM", "dumb: print progress as plain lines.")
DOCKER_CONFIG = _foreign("DOCKER_CONFIG", "Directory of registry credentials; default: ~/.docker.")
OPENAI_API_KEY = _foreign("OPENAI_API_KEY", "API key that trace-replay sends to its targets.")
HF_HOME = _foreign(
    "HF_HOME", "Directory of downloads from the Hugging Face Hub; default: $XDG_CACHE_HOME/huggingface."
)
HF_TOKEN = _foreign("HF_TOKEN", "Token for weights from the Hugging Face Hub.")
HF_HUB_OFFLINE = _foreign("HF_HUB_OFFLINE", "1: do not use the network for the Hugging Face Hub.")
TRANSFORMERS_OFFLINE = _foreign("TRANSFORMERS_OFFLINE", "Older name of HF_HUB_OFFLINE.")
TORCH_LOGS = _foreign("TORCH_LOGS", "Loggers of torch; a forked server applies its own value.")
HF_ENDPOINT = _foreign("HF_ENDPOINT", "URL of another hub.")
AWS_ENDPOINT_URL = _foreign(
    "AWS_ENDPOINT_URL", "URL of another object store; every AWS_ variable is passed to the prefetcher."
)
AWS_ENDPOINT = _foreign("AWS_ENDPOINT", "Older name of AWS_ENDPOINT_URL.")
PROMETHEUS_MULTIPROC_DIR = _foreign(
    "PROMETHEUS_MULTIPROC_DIR", "Directory in which processes share counters; set for a server if unset."
)
PYTORCH_CUDA_ALLOC_CONF = _foreign(
    "PYTORCH_CUDA_ALLOC_CONF",
    "torch's allocator on a GPU; with expandable_segments:True a fleet moves streams without their KV.",
)
VLLM_API_KEY = _foreign(
    "VLLM_API_KEY",
    "API key that a vLLM server requires; without it, serve warns if other machines can connect.",
)
VLLM_CPU_KVCACHE_SPACE = _foreign(
    "VLLM_CPU_KVCACHE_SPACE", "Size of the CPU engine's KV cache in GiB; if set, coldstart chooses no size."
)
VLLM_CPU_OMP_THREADS_BIND = _foreign(
    "VLLM_CPU_OMP_THREADS_BIND",
    "Cores that a CPU engine uses; if set, coldstart does not change vLLM's core reservation.",
)
VLLM_CPU_NUM_OF_RESERVED_CPU = _foreign(
    "VLLM_CPU_NUM_OF_RESERVED_CPU",
    "Number of cores that a CPU engine does not use; coldstart does not change a value that is set.",
)
VLLM_PP_LAYER_PARTITION = _foreign(
    "VLLM_PP_LAYER_PARTITION",
    "Number of layers of each pipeline stage, which determines the weights that a node needs.",
)
VLLM_CACHE_ROOT = _foreign("VLLM_CACHE_ROOT", "Directory of vLLM's cache; set for every start.")
VLLM_SERVER_DEV_MODE = _foreign(
    "VLLM_SERVER_DEV_MODE",
    "1: enable vLLM's development routes, such as sleep; set for servers that a host or `materialize` puts to sleep.",
)
TORCHINDUCTOR_CACHE_DIR = _foreign(
    "TORCHINDUCTOR_CACHE_DIR", "Directory of Inductor's cache; set for every start."
)
UCX_TLS = _foreign("UCX_TLS", "Transports of NIXL between servers; default: all except TCP.")

EVERY: tuple[Variable[object], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Variable)
)


# Kubernetes injects into a pod variables for each service of its namespace. They configure no program, but a service can have
# the name of one: a service `vllm` sets VLLM_PORT.
# The patterns are strings, which `re` compiles on first use: few environments have a name that they must match.
_ADDRESS = r"(?i:tcp|udp|sctp)://\S+"
_NUMBER = r"\d{1,5}"
_HOST = r"[0-9A-Fa-f:.]+"
_PROTOCOL = r"(?i:tcp|udp|sctp)"
# The end of the name, and the form of the value. NAME_PORT alone is also an ordinary name: its value decides.
_FORMS = (
    (r"\w+_SERVICE_HOST", _HOST),
    (r"\w+_SERVICE_PORT(?:_\w+)?", _NUMBER),
    (r"\w+_PORT(?:_\d+_(?:TCP|UDP|SCTP))?", _ADDRESS),
    (r"\w+_PORT_\d+_(?:TCP|UDP|SCTP)_PROTO", _PROTOCOL),
    (r"\w+_PORT_\d+_(?:TCP|UDP|SCTP)_PORT", _NUMBER),
    (r"\w+_PORT_\d+_(?:TCP|UDP|SCTP)_ADDR", _HOST),
)


def is_service_variable(name: str, value: str) -> bool:
    """Return whether Kubernetes injects a variable with this name and value for a service."""
    return any(re.fullmatch(names, name) and re.fullmatch(form, value) for names, form in _FORMS)


def drop_service_variables(environment: MutableMapping[str, str], prefix: str) -> list[str]:
    """Remove the variables that Kubernetes injected and whose names begin with `prefix`, and return their names."""
    dropped = [
        name
        for name, value in sorted(environment.items())
        if name.startswith(prefix) and is_service_variable(name, value)
    ]
    for name in dropped:
        del environment[name]
    return dropped
