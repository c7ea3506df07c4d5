"""Keep a run's memory on other hosts, too: each daemon sends its arenas to peers. Imports no torch."""
