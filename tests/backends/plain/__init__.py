"""A backend of plain PyTorch behind the op boundary: what a kernel file has to define, and no more."""
