#include "core.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>

#include "memory.h"
#include "parallel.h"
#include "wide.h"

namespace fakequant {
namespace {

// Whether the vector kernels would not be exact; see wide.h.
bool needs_wide(const Grid& g, int64_t parameters) {
  const auto beyond = [](int64_t v) { return v < -kNarrowLimit || v > kNarrowLimit; };
  if (beyond(g.qmin) || beyond(g.qmax) || g.zero_i64) return true;
  if (!g.zero_i32) return false;
  // Ones in the upper bits of v if it is at least the limit, or of ~v if it is below the negative one.
  int32_t ones = 0;
  for (int64_t i = 0; i < parameters; ++i) ones |= g.zero_i32[i] ^ (g.zero_i32[i] >> 31);
  return ones >= kNarrowLimit;
}

// --- elementwise: ranges of elements -------------------------------------------------------------

// Below this many elements waking another thread costs more than it saves.
constexpr int64_t kSerialElements = 1 << 15;
// Large enough to amortise the overhead of a task, small enough to balance the load between threads.
constexpr int64_t kElementsPerTask = 1 << 16;

// Calls body(begin, end) for ranges that cover [0, size), on several threads if there are enough elements.
template <class F> void over_elements(int64_t size, F&& body) {
  if (size <= kSerialElements || get_num_threads() == 1) return body(int64_t(0), size);
  // At least two tasks per thread. Ranges must start at multiples of kRangeAlignment; see KernelTable.
  const int64_t share = size / (2 * get_num_threads()) + 1;
  const int64_t per_task =
      (std::min(kElementsPerTask, share) + kRangeAlignment - 1) / kRangeAlignment * kRangeAlignment;
  const int64_t tasks = (size + per_task - 1) / per_task;
  run_tasks(tasks, [&](int64_t t) { body(t * per_task, std::min(size, (t + 1) * per_task)); });
}

// Calls body(begin, end) for ranges of rows that cover [0, rows).
template <class F> void over_rows(int64_t rows, int64_t columns, F&& body) {
  if (rows * columns <= kSerialElements || get_num_threads() == 1) return body(int64_t(0), rows);
  const int64_t per_task = std::max<int64_t>(1, std::min(kElementsPerTask / std::max<int64_t>(columns, 1),
                                                         rows / (2 * get_num_threads()) + 1));
  const int64_t tasks = (rows + per_task - 1) / per_task;
  run_tasks(tasks, [&](int64_t t) { body(t * per_task, std::min(rows, (t + 1) * per_task)); });
}

// --- reductions: tiles ---------------------------------------------------------------------------

constexpr int64_t kTileElements = 1 << 14;
// A partial result takes at least 16 bytes per block of a tile. With at least this many elements per partial result,
// partial results take much less memory than the input.
constexpr int64_t kMinElementsPerPartial = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Divides an array into tiles, by its shape alone. Each tile gives one partial result per block. A block that spans
// several row or position chunks has several partial results, which are combined in the order of the chunks.
struct Tiling {
  Shape shape;
  int64_t rows, blocks, positions;                    // per tile
  int64_t row_chunks, block_chunks, position_chunks;  // per batch

  explicit Tiling(const Shape& s) : shape(s) {
    positions = std::min(s.inner, kTileElements);
    blocks = std::clamp<int64_t>(kTileElements / positions, 1, s.blocks);
    const int64_t for_size = ceil_div(kTileElements, blocks * positions);
    const int64_t for_partials = ceil_div(kMinElementsPerPartial, positions);
    rows = std::clamp<int64_t>(std::max(for_size, for_partials), 1, s.outer);
    row_chunks = ceil_div(s.outer, rows);
    block_chunks = ceil_div(s.blocks, blocks);
    position_chunks = ceil_div(s.inner, positions);
  }
  int64_t chunks() const { return row_chunks * position_chunks; }
  int64_t tiles() const { return shape.batch * block_chunks * chunks(); }
  int64_t partials() const { return chunks() * shape.parameters(); }

  // Consecutive tiles are adjacent in memory.
  Tile tile(int64_t t) const {
    const int64_t j = t % position_chunks;
    const int64_t k = t / position_chunks % block_chunks;
    const int64_t o = t / (position_chunks * block_chunks) % row_chunks;
    const int64_t b = t / (position_chunks * block_chunks * row_chunks);
    return {b,
            o * rows, std::min(shape.outer, (o + 1) * rows),
            k * blocks, std::min(shape.blocks, (k + 1) * blocks),
            j * positions, std::min(shape.inner, (j + 1) * positions)};
  }
  // Index of the tile's first partial result: chunk c of parameter p is at c * parameters + p.
  int64_t partial_index(const Tile& t) const {
    const int64_t chunk = t.o0 / rows * position_chunks + t.j0 / positions;
    return chunk * shape.parameters() + t.batch * shape.blocks + t.k0;
  }
};

template <class F> void over_tiles(const Tiling& tiling, F&& body) {
  if (tiling.shape.size() > kSerialElements) {
    return run_tasks(tiling.tiles(), [&](int64_t t) { body(tiling.tile(t)); });
  }
  for (int64_t t = 0; t < tiling.tiles(); ++t) body(tiling.tile(t));
}

// With one block, all rows of a batch are one long row.
Shape merged(Shape s) {
  if (s.blocks == 1) {
    s.inner *= s.outer;
    s.outer = 1;
  }
  return s;
}

template <class T> std::unique_ptr<T[]> scratch(int64_t n) { return std::make_unique_for_overwrite<T[]>(size_t(n)); }

}  // namespace

void fake_quantize(const FakeQuantizeArgs& a) {
  const int64_t size = a.shape.size();
  if (size == 0) return;
  prepare_output(a.y, size_t(size * bytes_of(a.dtype)));
  if (a.mask_kind == MaskKind::bytes) prepare_output(a.mask, size_t(size));
  const auto kernel = needs_wide(a.grid, a.shape.parameters()) ? wide::fake_quantize : kernels().fake_quantize;
  over_elements(size, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
}

void fake_quantize_on_one_thread(const FakeQuantizeArgs& a) {
  const auto kernel = needs_wide(a.grid, a.shape.parameters()) ? wide::fake_quantize : kernels().fake_quantize;
  kernel(a, 0, a.shape.size());
}

void mask_backward(const MaskBackwardArgs& a) {
  prepare_output(a.dx, size_t(a.size * bytes_of(a.dtype)));
  const auto kernel = kernels().mask_backward;
  over_elements(a.size, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
}

int encode_levels(const EncodeLevelsArgs& a) {
  std::atomic<int> found{0};
  const auto kernel = kernels().encode_levels;
  over_rows(a.rows, a.columns, [&](int64_t begin, int64_t end) {
    if (found.load(std::memory_order_relaxed)) return;
    if (const int reason = kernel(a, begin, end)) found.fetch_or(reason, std::memory_order_relaxed);
  });
  return found.load();
}

void scale_sums(const ScaleSumsArgs& a) {
  const auto kernel = kernels().scale_sums;
  over_rows(a.rows, a.columns, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
}

void scale_planes(const ScalePlanesArgs& a) {
  const auto kernel = kernels().scale_planes;
  const int64_t columns = a.channels_last ? a.channels * kPixelsPerPart : a.pixels;
  over_rows(scale_planes_parts(a), columns, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
}

void quantize(const QuantizeArgs& a) {
  const int64_t size = a.shape.size();
  if (size == 0) return;
  prepare_output(a.q, size_t(size * bits_of(a.code) / 8));
  const auto kernel = needs_wide(a.grid, a.shape.parameters()) ? wide::quantize : kernels().quantize;
  over_elements(size, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
}

void dequantize(const DequantizeArgs& a) {
  const int64_t size = a.shape.size();
  if (size == 0) return;
  prepare_output(a.y, size_t(size * bytes_of(a.dtype)));
  const auto kernel = needs_wide(a.grid, a.shape.parameters()) ? wide::dequantize : kernels().dequantize;
  over_elements(size, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
}

void learned_backward(const LearnedBackwardArgs& args) {
  LearnedBackwardArgs a = args;
  a.shape = merged(a.shape);
  const int64_t parameters = a.shape.parameters();
  std::fill_n(a.dscale, parameters, 0.0);
  if (a.dzero) std::fill_n(a.dzero, parameters, 0.0);
  if (a.shape.size() == 0) return;
  prepare_output(a.dx, size_t(a.shape.size() * bytes_of(a.dx_dtype)));
  const auto kernel = needs_wide(a.grid, parameters) ? wide::learned_backward : kernels().learned_backward;
  const Tiling tiling(a.shape);
  auto ds = scratch<double>(tiling.partials());
  auto dz = a.dzero ? scratch<double>(tiling.partials()) : nullptr;
  over_tiles(tiling, [&](const Tile& t) {
    const int64_t i = tiling.partial_index(t);
    kernel(a, t, {ds.get() + i, dz ? dz.get() + i : nullptr});
  });
  for (int64_t c = 0; c < tiling.chunks(); ++c) {
    for (int64_t p = 0; p < parameters; ++p) {
      a.dscale[p] += ds[c * parameters + p];
      if (dz) a.dzero[p] += dz[c * parameters + p];
    }
  }
}

void min_max(const MinMaxArgs& args) {
  MinMaxArgs a = args;
  a.shape = merged(a.shape);
  const int64_t parameters = a.shape.parameters();
  const double inf = std::numeric_limits<double>::infinity();
  std::fill_n(a.lo, parameters, inf);
  std::fill_n(a.hi, parameters, -inf);
  std::fill_n(a.nan_count, parameters, 0);
  std::fill_n(a.posinf_count, parameters, 0);
  std::fill_n(a.neginf_count, parameters, 0);
  if (a.shape.size() == 0) return;
  const auto kernel = kernels().min_max;
  const Tiling tiling(a.shape);
  const int64_t n = tiling.partials();
  auto range = scratch<double>(2 * n);
  auto count = scratch<int64_t>(3 * n);
  over_tiles(tiling, [&](const Tile& t) {
    const int64_t i = tiling.partial_index(t);
    kernel(a, t, {range.get() + i, range.get() + n + i, count.get() + i, count.get() + n + i, count.get() + 2 * n + i});
  });
  for (int64_t c = 0; c < tiling.chunks(); ++c) {
    for (int64_t p = 0; p < parameters; ++p) {
      const int64_t i = c * parameters + p;
      a.lo[p] = std::min(a.lo[p], range[i]);
      a.hi[p] = std::max(a.hi[p], range[n + i]);
      a.nan_count[p] += count[i];
      a.posinf_count[p] += count[n + i];
      a.neginf_count[p] += count[2 * n + i];
    }
  }
}

}  // namespace fakequant
