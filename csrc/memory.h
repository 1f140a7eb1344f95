// Huge pages for large outputs.
#pragma once

#include <cstddef>

namespace fakequant {

// Requests 2 MiB pages for an output that is about to be written. Large outputs are usually fresh pages, which the
// operating system zeroes on first touch; with 4 KiB pages that takes longer than the computation, with 2 MiB pages it
// is several times cheaper. Does nothing for small outputs or on systems without madvise(MADV_HUGEPAGE).
void prepare_output(void* data, size_t bytes);

}  // namespace fakequant
