"""Communication between processes of one machine, and the addresses that servers listen on."""
