from tests.support.graphs_fixtures import bundle_directory

__all__ = ["bundle_directory"]
