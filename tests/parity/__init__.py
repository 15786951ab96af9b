"""llama.cpp's own server tests, run against a llama-server and against ``paceline serve``."""
