"""The training examples by every model and mesh, beside what training_cases.py has."""

from tests.distributed.training_cases import as_one, train_language, train_vision

TOST = "--model=tost_lm_base"
CASES = {
    "run-data": as_one(train_language),
    "run-tensor": as_one(train_language, tensor="all"),
    "run-clipped": as_one(train_language, "--clip=0.01", tensor="all"),
    "run-tost-data": as_one(train_language, TOST),
    "run-tost-sequence": as_one(train_language, TOST, sequence="all"),
    "run-tost-tensor": as_one(train_language, TOST, tensor="all"),
    "run-overcomplete-data": as_one(train_language, "--model=crate_lm_overcomplete_1l"),
    "run-vision-data": as_one(train_vision),
    "run-vision-tensor": as_one(train_vision, "--recompute", tensor="all"),
    "run-alpha-tensor": as_one(train_vision, "--model=crate_alpha_ti16", tensor="all"),
}
