"""Several models behind one address, each in a process of its own, which is there while it is of use."""
