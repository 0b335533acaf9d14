"""A bundle made once for all tests that only read it."""

from support.graphs_fixtures import bundle_directory, rounds_bundle, rounds_made

__all__ = ["bundle_directory", "rounds_bundle", "rounds_made"]
