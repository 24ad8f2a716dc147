"""Hugging Face folders: their files, and weights from and to them, on a mesh or without one."""
