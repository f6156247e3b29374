"""Runs a program on a cache beside a plain list of its tokens, and compares after every step."""

import torch

from tests.apart import oracle
from tests.apart.call import DTYPES
from tests.apart.judge import Verdict, documented
from tests.apart.tolerance import FORWARD, ToleranceChecker, Wrong, check, same


def follow(call, space):
    """Run the steps of ``call`` and return the verdict."""
    cache = space["cache"]
    nheads, head_dim = (cache.data if call.op == "mssa" else cache.energy).shape[1 :: 2 if call.op == "mssa" else 1]
    rows = [torch.zeros(nheads, 0, head_dim, dtype=DTYPES[call.dtype]) for _ in cache.lengths]
    verdict, frozen = Verdict("passed"), {}
    for number, step in enumerate(call.steps):
        where = f"step {number} ({step['kind']}): "
        *setup, line = step["lines"]
        exec("\n".join(setup), space)
        stored = _tensors(space["cache"])
        before = {name: (value.clone(), value._version) for name, value in stored.items()}
        if step["kind"] == "append":
            _append(call, step, line, space, where)
            if step["full"]:
                for name, (value, _) in before.items():
                    check(same(stored[name], value), f"{where}{name} was written to by an append that was refused")
                continue
            verdict = max(
                verdict, _check_outputs(call, step, space, rows, where), key=lambda v: (v.status == "close", v.ratio)
            )
            w, kept = space["w"], _kept_tokens(space, step)
            rows = [torch.cat([row, w[b][:, kept[b]]], 1) for b, row in enumerate(rows)]
            with torch.inference_mode():  # the cache keeps none of the memory of what went in and came out
                for name in ("w", *step["outputs"]):
                    space[name].fill_(-7.0)
        else:
            exec(line, space)
            if step["kind"] == "clone":
                frozen = {name: value.clone() for name, value in _tensors(space["other"]).items()}
            elif step["kind"] == "reorder":
                rows = [rows[i] for i in step["index"]]
            else:
                rows = [row[:, :n] for row, n in zip(rows, step["keep"], strict=True)]
        _compare(call, space["cache"], rows, where)
        for name, value in stored.items():
            risen = value._version > before[name][1]
            check(risen or same(value, before[name][0]), f"{where}{name} was written to and its version did not rise")
    for name, value in frozen.items():
        check(same(value, _tensors(space["other"])[name]), f"{name} of a cache was written to through its clone")
    return verdict


def _tensors(cache):
    names = ("data", "energy", "weighted", "mass", "lengths")
    return {name: getattr(cache, name) for name in names if hasattr(cache, name)}


def _kept_tokens(space, step):
    """Return which new tokens count, (batch, new)."""
    w = space["w"]
    return space["mask"] if step["masked"] else torch.ones(w.shape[0], w.shape[2], dtype=torch.bool)


def _append(call, step, line, space, where):
    """Make the call of one append, which is refused where the cache is full and nowhere else."""
    try:
        exec(line, space)
    except ValueError as error:
        if step["full"] and "cache is full" in str(error):
            return
        raise Wrong(f"{where}ValueError: {error}") from error
    except Exception as error:
        documented(call, error)
    check(not call.refusal, "must be refused: the dtype is not the backend's")
    check(not step["full"], f"{where}must be refused: the cache is full")


def _compare(call, cache, rows, where):
    """Compare the cache with the rows that it must hold."""
    lengths = [row.shape[1] for row in rows]
    check(cache.lengths.tolist() == lengths, f"{where}lengths are {cache.lengths.tolist()}, not {lengths}")
    if call.op == "mssa":
        for b, row in enumerate(rows):
            check(same(cache.data[b, :, : row.shape[1]], row), f"{where}the cache holds other tokens in row {b}")


def _check_outputs(call, step, space, rows, where):
    """Compare what one append returned with the tolerance."""
    kept, names = _kept_tokens(space, step), call.outputs
    tensors = {"w": space["w"], "temp": space.get("temp"), "bias": space.get("bias")}
    tensors |= {f"row {b}": row for b, row in enumerate(rows)}

    def evaluate(tensors, cast, nudge, context):
        del nudge, context
        t = {n: v.to(cast) if cast and v is not None else v for n, v in tensors.items()}
        cached = [t[f"row {b}"] for b in range(len(rows))]
        both = _attention(call, cached, t["w"], kept) if call.op == "mssa" else _statistics(cached, t, kept)
        return dict(zip(names, both, strict=True))

    checker = ToleranceChecker(evaluate, tensors, call.dtype, lenient=step["backend"] == "reference")
    for name in step["outputs"]:
        checker.check_against(name, space[name], FORWARD, where)
    checker.raise_if_over()
    return Verdict("close" if checker.close else "passed", checker.why, checker.worst)


def _attention(call, rows, w, kept):
    """Return out and lse of new tokens, each of which sees all cached ones and the kept new ones up to itself."""
    results = []
    for row, new, mask in zip(rows, w, kept, strict=True):
        keys = torch.cat([row, new[:, mask]], 1)[None]
        visible = torch.arange(keys.shape[2]) < (row.shape[1] + mask.cumsum(0))[:, None]
        out, lse = _nan_where_undefined(keys, *oracle.attend(new[None], keys, visible, scale=call.scale))
        results.append((out, lse.where(new.isfinite().all(-1), torch.nan)))
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


def _statistics(rows, t, kept):
    """Return out and membership of new tokens after the cached ones."""
    results = []
    for row, new, mask in zip(rows, t["w"], kept, strict=True):
        start = row.shape[1]
        counted = torch.cat([torch.ones(start, dtype=torch.bool), mask])[None]
        tokens = torch.cat([row, new.masked_fill(~mask[:, None], 0.0)], 1)[None]  # padded tokens count as zeros
        out, membership = oracle.tssa_causal(tokens, t["temp"], t["bias"], mask=counted)
        results.append(_nan_where_undefined(tokens, out[:, :, start:], membership[:, :, start:]))
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


def _nan_where_undefined(tokens, *results):
    """Return NaN, which is not judged, for a sequence that holds tokens without a value."""
    return [result if tokens.isfinite().all() else torch.full_like(result, torch.nan) for result in results]
