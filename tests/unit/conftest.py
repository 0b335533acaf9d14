"""Fixtures of several packages: directories of one user, fake engines and their bundles, a fake NVML library, a pipe."""

from support.engines import fake_engine, home, lacking, model, pair, publish
from support.fake_nvml import built, fake
from support.graphs.library import checkpoints
from support.progress_pipe import pipe

__all__ = [
    "built",
    "checkpoints",
    "fake",
    "fake_engine",
    "home",
    "lacking",
    "model",
    "pair",
    "pipe",
    "publish",
]
