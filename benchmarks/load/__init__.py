"""Load for servers: what clients send, what they read, and when it came.

======== ==============================================================================
asking   one request: what is sent, and two readers of what comes back
laps     clients of a process of their own, for ``python -m benchmarks serving``
traffic  what is asked: prompts that begin alike, and when they are sent
command  ``python -m benchmarks load``, for any server, gateway, or several of them
======== ==============================================================================
"""
