"""The frozen records that stages exchange and save; no torch, JSON both ways."""
