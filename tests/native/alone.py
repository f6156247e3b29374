"""A process with the C++ extension and without the package: runs recorded calls, programs and traces.

python alone.py extension in.pt out.pt
"""

import ctypes
import sys

import torch


def main(extension, request, found):
    """Answer what ``request`` asks: schemas, results of calls, messages of refused ones, and results of files."""
    torch.ops.load_library(extension)
    define = ctypes.CDLL(extension).crate_kernels_define_operators
    define()
    define()  # once more changes nothing
    asked = torch.load(request)
    results = {
        "schemas": {name: str(op(name)._schema) for name in asked["schemas"]},
        "calls": [results_of(op(name)(*args)) for name, args in asked["calls"]],
        "refused": [message(op(name), args) for name, args in asked["refused"]],
    }
    with torch.no_grad():
        results["files"] = {path: load(path)(*inputs) for path, inputs in asked["files"].items()}
    assert "crate_kernels" not in sys.modules
    torch.save(results, found)


def op(name):
    return getattr(torch.ops.crate_kernels, name).default


def results_of(result):
    return result if isinstance(result, tuple) else (result,)


def message(call, args):
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)


def load(path):
    return torch.jit.load(path) if path.endswith(".pt") else torch.export.load(path).module()


if __name__ == "__main__":
    main(*sys.argv[1:])
