"""ThreadSanitizer on the CPU kernels and on the code that cuts their work among threads.

PyTorch shares work by OpenMP, whose barriers the sanitizer does not know, and is itself not compiled with it: a build
of the extension reports races that are none. Here csrc is compiled against small headers in place of PyTorch's, with
threads of C++, wholly with the sanitizer; nothing is suppressed.
"""
