"""The page at ``/`` of a server: files in ``web``, sent as they are. Browsers need nothing from elsewhere."""
