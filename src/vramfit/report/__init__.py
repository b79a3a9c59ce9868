"""Records shown to people: terminal, HTML, JSON. Renders, never computes."""
