"""Tools that explain and reproduce results: traces, replays and simulators. No server needs them."""
