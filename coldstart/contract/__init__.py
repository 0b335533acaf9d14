"""Values that cross process boundaries: launch plan, arguments, fallbacks, environment variables. Standard library only."""
