"""Tools that explain and reproduce results, and that no server needs: traces, replays and simulators."""
