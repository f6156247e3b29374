"""``redunet``: networks built forward by rate reduction, on the book's two examples."""
