"""What answers look like in the terms of each API: whole, and chunk by chunk."""
