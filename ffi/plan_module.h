// The plan and its instruction streams as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

namespace jax_xdna {

void BindPlan(nanobind::module_& m);

}  // namespace jax_xdna
