"""Launch tables of the Triton kernels.

A launch table maps (GPU architecture, head_dim, seqlen, causal, half precision) to the tile sizes, warps and
stages of one kernel. It has a list of rows per architecture; the first row that fits is taken. Nothing is timed at
import or in a call. ``python -m crate_kernels tune`` times the candidates on the user's GPU and writes rows that come
before the shipped ones.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from crate_kernels._core import files, plan
from crate_kernels._native import libraries, ninja_build
from crate_kernels._triton import launch

Config = Mapping[str, int]
_CUDA = ("sm_80", "sm_89", "sm_90", "sm_100")
_HIP = ("gfx942",)
LONGEST = 1 << 20  # the last bucket of sequence lengths
_TUNED = Path(__file__).with_name("tuned")  # tables that were tuned elsewhere, by the GPU's name


@dataclass(frozen=True)
class LaunchRow:
    """One row of a launch table; a condition that is None always holds.

    Attributes:
        config: constexpr arguments of the kernel by name, with num_warps and num_stages.
        head_dim: the largest head_dim that fits.
        seqlen: the longest sequence that fits.
        causal: True for the causal form only, False for the full form only.
        half: True for 16-bit tokens only, False for fp32 tokens only.
    """

    config: Config
    head_dim: int | None = None
    seqlen: int | None = None
    causal: bool | None = None
    half: bool | None = None

    @property
    def conditions(self) -> tuple[int | None, int | None, bool | None, bool | None]:
        """The conditions that a call must meet."""
        return self.head_dim, self.seqlen, self.causal, self.half

    def fits(self, head_dim: int, seqlen: int, causal: bool, half: bool) -> bool:
        """Return whether a call meets the conditions."""
        return (
            (self.head_dim is None or head_dim <= self.head_dim)
            and (self.seqlen is None or seqlen <= self.seqlen)
            and self.causal in (None, causal)
            and self.half in (None, half)
        )


@dataclass(frozen=True)
class Table:
    """The launch table of one kernel.

    Attributes:
        name: unique; the key of the table's rows in the user's cache.
        rows: rows by architecture; each list ends in a row without conditions.
        candidates: the configurations that ``tune`` times.
    """

    name: str
    rows: Mapping[str, tuple[LaunchRow, ...]]
    candidates: tuple[Config, ...] = ()

    def config(self, device: torch.device, head_dim: int, seqlen: int, causal: bool, dtype: torch.dtype) -> Config:
        """Return the configuration of a call on ``device``."""
        if self.name in _forced:
            return _forced[self.name]
        half = dtype != torch.float32
        return _find(self, launch.arch(device), launch.gpu_name(device), head_dim, bucket(seqlen), causal, half)

    def shipped(self, device: torch.device, head_dim: int, seqlen: int, causal: bool, dtype: torch.dtype) -> Config:
        """Return the configuration of a call on ``device``, ignoring tuned rows."""
        return _find(self, launch.arch(device), "", head_dim, bucket(seqlen), causal, dtype != torch.float32)

    def __hash__(self) -> int:
        """Hash by name: rows are mappings."""
        return hash(self.name)


_forced: dict[str, Config] = {}


@contextmanager
def forced(table: Table, config: Config) -> Iterator[None]:
    """Make ``table`` return ``config`` for every call. For ``tune`` and for tests of single configurations."""
    previous = dict(_forced)
    try:  # an interrupt may come anywhere
        _forced[table.name] = config
        plan.forget()
        yield
    finally:
        _forced.clear()
        _forced.update(previous)
        plan.forget()


@functools.lru_cache(maxsize=4096)
def _find(table: Table, key: str, gpu: str, head_dim: int, seqlen: int, causal: bool, half: bool) -> Config:
    """Return the configuration of the first row that fits: the user's, this GPU's, then this architecture's."""
    own = table.rows[_nearest(key, tuple(table.rows))]
    tuned = (*user_rows(gpu).get(table.name, ()), *_shipped_rows(gpu).get(table.name, ()))
    # An earlier version's kernel had other arguments.
    tuned = (row for row in tuned if _entries(row) == _entries(own[0]))
    return next(row.config for row in (*tuned, *own) if row.fits(head_dim, seqlen, causal, half))


def _entries(row: LaunchRow) -> set[str]:
    """Return the names in a row's configuration, without what it may have or lack."""
    return row.config.keys() - {"maxnreg", "PERSISTENT"}


def bucket(seqlen: int) -> int:
    """Round a length up to a power of two, so that many lengths share few configurations."""
    return min(1 << max(seqlen - 1, 0).bit_length(), LONGEST)


def _nearest(key: str, known: tuple[str, ...]) -> str:
    """Return ``key`` if a table has it, else the newest architecture below it of the same vendor, else the oldest."""
    if key in known:
        return key
    same = [k for k in (_CUDA if key.startswith("sm_") else _HIP) if k in known]
    below = [k for k in same if _number(k) <= _number(key)]
    return below[-1] if below else same[0]


def _number(key: str) -> int:
    return int(re.sub(r"\D", "", key) or 0)


def user_table(gpu: str) -> Path:
    """Return the file in which ``tune`` keeps the rows of a GPU."""
    return libraries.user_cache() / "tune" / f"{files.plain_name(gpu)}.json"


@functools.lru_cache(maxsize=16)
def user_rows(gpu: str) -> Mapping[str, tuple[LaunchRow, ...]]:
    """Read the rows that ``tune`` wrote for a GPU, by table; empty without a valid file."""
    try:
        return _read_tables(user_table(gpu)) if gpu else {}
    except (OSError, RuntimeError):  # no home
        return {}


@functools.lru_cache(maxsize=16)
def _shipped_rows(gpu: str) -> Mapping[str, tuple[LaunchRow, ...]]:
    """Read the rows that were tuned for a GPU of this name and are part of the package."""
    return _read_tables(_TUNED / f"{files.plain_name(gpu)}.json") if gpu else {}


def _read_tables(path: Path) -> Mapping[str, tuple[LaunchRow, ...]]:
    """Read a file of ``tune``; empty if there is none, or it is from another version."""
    try:
        tables = json.loads(path.read_text())["tables"]
        return {name: rows for name, found in tables.items() if (rows := _read_rows(found)) is not None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _read_rows(rows: list[dict]) -> tuple[LaunchRow, ...] | None:
    """Return the rows of one table; None if another version wrote them, whose tables had other columns."""
    try:
        return tuple(LaunchRow(**row) for row in rows)
    except TypeError:
        return None


def write_user_rows(gpu: str, tables: Mapping[str, Iterable[LaunchRow]]) -> Path:
    """Add rows to the file of ``tune``; a row replaces an older one with the same conditions. Effective at once."""
    path = user_table(gpu)
    # The file has every table: read, change and write it before another process does.
    with ninja_build.locked(path.parent):
        user_rows.cache_clear()
        rows = dict(user_rows(gpu))
        for name, found in tables.items():
            every = {row.conditions: row for row in (*rows.get(name, ()), *found)}
            # The first row that fits is taken: sort the narrowest first.
            rows[name] = tuple(sorted(every.values(), key=lambda r: (r.head_dim or math.inf, r.seqlen or math.inf)))
        body = {"gpu": gpu, "tables": {name: [asdict(row) for row in own] for name, own in rows.items()}}
        files.put(path, f"{json.dumps(body, indent=1)}\n".encode())
    user_rows.cache_clear()
    _find.cache_clear()
    plan.forget()
    return path
