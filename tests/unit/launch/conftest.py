"""Fake templates and servers, and a user's own directories."""

from support.engines import fake_engine, home, model, pair, publish

__all__ = ["fake_engine", "home", "model", "pair", "publish"]
