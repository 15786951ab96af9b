"""Chat models: templates, messages, reasoning."""
