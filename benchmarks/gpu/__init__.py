"""What a GPU makes of it: a pack made where there is a network, run where there is a card and nothing else.

::

    packing.py: sources, wheels ──> gpu.pyz ··········> start.py: unpacked by a plain Python
                                                            │
         report.py: docs/results <── lines <── running.py: steps, the most important first, each a process
                                                            │
                                          building.py: llama.cpp for this card      measuring.py: one step's figures

The pack is a zip file that Python runs. A line of JSON is written for each figure as soon as it is known, and the table
is written anew after each line, so that whatever ends the run ends no more than the step that was under way.
"""
