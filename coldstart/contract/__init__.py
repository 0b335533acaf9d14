"""What crosses process boundaries: the launch plan and the names of environment variables. Standard library only."""
