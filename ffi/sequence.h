// The order in which a plan's transfers, runtime words and locks are written.
#pragma once

#include "plan.h"

namespace jax_xdna {

// Fills in `steps` from the rest of the plan.
void BuildSteps(GemmPlan& plan);

}  // namespace jax_xdna
