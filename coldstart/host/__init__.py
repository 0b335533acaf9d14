"""Many models behind one endpoint of one machine: which are resident, and what leaves when another is asked for."""
