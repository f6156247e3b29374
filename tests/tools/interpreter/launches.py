"""Let Triton's interpreter patch Triton's language once per launch, not again in every call of a helper.

Repeated patching takes two thirds of the time of interpreted tests. Results do not change.
"""

from contextlib import contextmanager

import pytest
from triton.runtime import interpreter


@contextmanager
def patched_once():
    """Patch the interpreter for as long as the context is open."""
    patch_language, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def once(function):
        modules = frozenset(id(m) for m in (interpreter.tl, interpreter.tl.core) if m in function.__globals__.values())
        if modules not in patched:
            patched.add(modules)
            return patch_language(function)

    def launched(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        yield
