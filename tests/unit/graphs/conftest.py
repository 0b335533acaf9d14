"""Bundles that are created once for all tests that only read them."""

from support.graphs_worker import bundle_directory, here, rounds_bundle

__all__ = ["bundle_directory", "here", "rounds_bundle"]
