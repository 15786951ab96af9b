"""What a server counts, as Prometheus reads it: under llama-server's names, vLLM's, and paceline's own.

::

    engine's thread   observe(record) ──> RoundTotals  ──┐
    HTTP side         request_over()  ──> AnswerTotals ──┤    llama_server.py   llamacpp:*
                      refused()       ──> refused      ──┼──> vllm.py           vllm:*       ──> render()
                      load()          ──> ServerLoad   ──┘    own.py            paceline:*

Totals are plain numbers behind one lock, and a scrape reads all of them at one moment: counters of the three families
agree with each other.
"""

from paceline.serving.metrics.server_metrics import ServerMetrics
from paceline.serving.metrics.totals import ServerLoad

__all__ = ["ServerLoad", "ServerMetrics"]
