"""Communication between processes of one machine, and addresses of servers."""
