// How long a plan takes, from published measurements.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace jax_xdna {

Prediction Predict(const GemmPlan& plan);

// Pieces of the product for a pipeline of packing, running and unpacking. Fills in the plan's.
void ChooseChunks(GemmPlan& plan);

// A figure of the model: what it is, its value in SI units, and where it was published.
struct ModelConstant {
  std::string name;
  double value;
  std::string source;
};
std::vector<ModelConstant> ModelConstants(Arch arch, Numerics numerics);

}  // namespace jax_xdna
