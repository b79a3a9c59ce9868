"""The API and the page of `vramfit web`: on loopback, bounded in size and time, computed in worker processes."""
