"""``icl``: linear regression in context, by attention alone and by a standard transformer."""
