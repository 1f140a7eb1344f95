// Divides a range of elements into runs: contiguous elements that share one scale, which a kernel keeps in registers,
// or that have one scale each, which a kernel loads like the elements.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace fakequant::FQ_TARGET {

struct Run {
  int64_t start;      // first element
  int64_t length;
  int64_t parameter;  // of the first element
  bool per_element;   // element i uses parameter + i (inner == 1); otherwise one parameter for the whole run
};

// Calls visit(Run) for the runs that cover the elements [begin, end), in order.
template <class F>
FQ_INLINE void for_each_run(const Shape& shape, int64_t begin, int64_t end, F&& visit) {
  if (begin >= end) return;
  const bool per_element = shape.inner == 1 && shape.blocks > 1;
  // With one block, all rows of a batch are one run.
  const int64_t run = per_element ? shape.blocks
                      : shape.blocks == 1 ? shape.outer * shape.inner
                                          : shape.inner;
  const int64_t runs_per_batch = shape.outer * shape.blocks * shape.inner / run;
  int64_t row = begin / run;
  int64_t offset = begin - row * run;
  int64_t batch = row / runs_per_batch;
  int64_t row_in_batch = row - batch * runs_per_batch;
  int64_t block = per_element || shape.blocks == 1 ? 0 : row_in_batch % shape.blocks;
  for (int64_t start = begin; start < end;) {
    const int64_t left = end - start, rest = run - offset;
    const int64_t length = rest < left ? rest : left;
    const int64_t parameter = batch * shape.blocks + (per_element ? offset : block);
    visit(Run{start, length, parameter, per_element});
    start += length;
    offset = 0;
    if (!per_element && ++block == shape.blocks) block = 0;
    if (++row_in_batch == runs_per_batch) {
      row_in_batch = 0;
      block = 0;
      ++batch;
    }
  }
}

}  // namespace fakequant::FQ_TARGET
