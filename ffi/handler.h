#pragma once

#include "xla/ffi/api/ffi.h"

// The one FFI target: C = op(A) · op(B). Operands, attributes and errors are described in
// jax_xdna/_ffi.pyi.
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxXdnaGemm);
