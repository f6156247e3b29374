"""Tools that check what is shipped: the supported versions, and the wheel."""
