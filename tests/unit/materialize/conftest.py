"""Fake templates and servers, and directories of one user."""

from support.engines import fake_engine, home, model, pair, publish

__all__ = ["fake_engine", "home", "model", "pair", "publish"]
