"""Small headers in place of PyTorch's, so that csrc compiles without it: for a sanitizer, and for other processors."""
