"""The training examples on meshes of two dimensions, in four processes."""

from tests.distributed.training_cases import as_one, train_language, train_vision

MESHES = {
    "data-sequence": {"sequence": 2},
    "data-tensor": {"tensor": 2},
    "sequence-tensor": {"sequence": 2, "tensor": 2},
    "replicas": {"replicas": 2},
    "replicas-sequence": {"replicas": 2, "sequence": 2},
    "replicas-tensor": {"replicas": 2, "tensor": 2},
}
RUNS = {
    "crate": (train_language,),
    "crate-recomputed": (train_language, "--recompute"),
    "tost": (train_language, "--model=tost_lm_base"),
    "vision": (train_vision,),
}
CASES = {
    f"run-{name}-{pair}": as_one(example, *more, **mesh)
    for pair, mesh in MESHES.items()
    for name, (example, *more) in RUNS.items()
    if example is train_language or "sequence" not in mesh
}
