"""Files of models: found by path, by name or on the hub, and what their headers say."""
