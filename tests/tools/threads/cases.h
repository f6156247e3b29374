// The cases of each operator, for main.cpp.
#pragma once

#include <torch/csrc/stable/ops.h>

using torch::stable::ScalarType;
using torch::stable::Tensor;

// Run every form of an operator on tokens of a dtype.
void run_mssa(ScalarType dtype);
void run_mssa_decode(ScalarType dtype);
void run_mssa_rectangular(ScalarType dtype);
void run_tssa(ScalarType dtype);
void run_ista(ScalarType dtype);

// Two threads add their parts of one head's gradient to the same rows: a race, to see that it is reported.
void run_planted_race();
