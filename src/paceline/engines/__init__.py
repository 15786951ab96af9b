"""Engines: one contract (``base``), three implementations.

``llama_cpp`` and ``torch_hf`` are loaded only when asked for by name. ``scripted`` has none: its model is a function.
"""
