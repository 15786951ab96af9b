"""Programs that others made, at work with a server whose model says what a script says."""
