"""Tool calls: how families of models write them, read back while they arrive, and the grammar that forces them."""
