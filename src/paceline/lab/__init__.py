"""What measures and shows: bench, doctor, demo, race, replays, inflated models; the command line alone uses it."""
