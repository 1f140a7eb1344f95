// Memory of large results and temporaries that is used again once nothing refers to it.
//
// A step of training frees and allocates the same sizes over and over. The C library gives large blocks back to the
// system, which then fills every page of the next one with zeros, one page fault at a time.
#pragma once

#include <ATen/core/Tensor.h>

namespace fakequant::autograd {

// As at::empty and at::empty_like, on the CPU.
at::Tensor reusable_empty(at::IntArrayRef sizes, at::ScalarType dtype);
at::Tensor reusable_empty_like(const at::Tensor& x, at::ScalarType dtype);

// Frees what nothing refers to, and gives memory that is free back to the system.
void release_memory();

}  // namespace fakequant::autograd
