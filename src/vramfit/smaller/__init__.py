"""Smaller models made from larger ones: what is written is a folder that transformers loads without vramfit."""
