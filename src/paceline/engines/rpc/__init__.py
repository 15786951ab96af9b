"""Models whose layers lie on other machines: llama.cpp's RPC, workers that serve it, and an engine over them.

::

    addresses.py    where workers are, and who can reach them
    worker.py       paceline rpc-worker: one port, a process for each client
    workers.py      what a client asks of workers: versions, memory, heartbeats
"""
