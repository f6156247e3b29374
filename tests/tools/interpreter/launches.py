"""Let Triton's interpreter do nothing twice that it does at every launch, call or operation. Results do not change.

By itself it patches Triton's language at each launch and each call of a helper, looks for an overflow of each integer
operation and drops what it found, and builds types, shapes and their names anew for each tensor: more than half of the
time of interpreted tests.
"""

import dataclasses
import functools
from contextlib import contextmanager

import pytest
import triton.language as tl
from triton.runtime import interpreter


def _patched_once(patch_language, scopes):
    """Patch the language for the first function that sees each module of it, and leave it so."""
    seen = set()

    @functools.cache
    def modules(function):
        return frozenset(id(m) for m in (tl, tl.core) if any(m is value for value in function.__globals__.values()))

    def patch(function):
        if modules(function) not in seen:
            seen.add(modules(function))
            scopes.append(patch_language(function))
        return interpreter._LangPatchScope()  # of nothing

    return patch


def _attach(obj, name, member, builder, scope):
    """Give a builtin its semantic, as the interpreter does, by one dictionary less."""
    semantic = interpreter.interpreter_semantic

    def call(*args, _semantic=None, **kwargs):
        return member(*args, _semantic=semantic, **kwargs)

    scope.set_attr(obj, name, call)


def _numpy_dtypes(find):
    """Remember NumPy's type of each of Triton's, by name."""
    found = {}

    def remembered(dtype):
        if dtype.name not in found:
            found[dtype.name] = find(dtype)
        return found[dtype.name]

    return remembered


def _block_type(initialise):
    """Remember what a type of blocks finds out, by shape and name of the elements."""
    found = {}

    @functools.wraps(initialise)
    def remembered(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in getattr(shape, "values", shape))
        if key not in found:
            initialise(self, element_ty, shape)
            found[key] = dict(vars(self))
        vars(self).update(found[key])

    return remembered


def _tensor(initialise):
    """Remember what a tensor takes from its type, by its name."""
    found = {}

    @functools.wraps(initialise)
    def remembered(self, handle, type):
        if type.name not in found:
            initialise(self, handle, type)
            found[type.name] = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = found[type.name]

    return remembered


@contextmanager
def quick():
    """Patch the interpreter for as long as the context is open."""
    scopes = []
    with pytest.MonkeyPatch.context() as patch:
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter, "_patch_lang", _patched_once(interpreter._patch_lang, scopes))
        patch.setattr(interpreter, "_patch_attr", _attach)
        patch.setattr(interpreter, "_get_np_dtype", _numpy_dtypes(interpreter._get_np_dtype))
        patch.setattr(tl.block_type, "__init__", _block_type(tl.block_type.__init__))
        patch.setattr(tl.tensor, "__init__", _tensor(tl.tensor.__init__))
        yield
    for scope in reversed(scopes):
        scope.restore()
