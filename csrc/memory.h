// Memory that is about to be written for the first time.
#pragma once

#include <cstddef>

namespace fakequant {

// Outputs of tens of megabytes come as fresh pages, and the kernel zeroes each at the first touch;
// in 4 KiB pages that takes longer than the computation. Asking for 2 MiB pages first makes it
// several times cheaper. Does nothing for small outputs or where the system has no such call.
void prepare_output(void* data, size_t bytes);

}  // namespace fakequant
