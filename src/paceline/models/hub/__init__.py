"""Models from the Hugging Face hub: found, fetched, resumed, and kept in the hub's own cache on this machine.

::

    -hf user/repo:Q8_0 ──reference──> HubModel ──fetch──> one look at the hub ──choice──> files ──transfer──> cache ──>
    path
                                       └── offline ──local_cache──> what lies in the cache ──choice──> path

The cache is that of ``huggingface_hub``, which other programs share. ``local_cache`` reads it without that library, so
that names are listed and models start without its import.
"""
