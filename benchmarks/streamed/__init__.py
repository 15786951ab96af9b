"""Models larger than memory, measured in a box: a process with little memory and a slow disk."""
