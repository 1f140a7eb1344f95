// Histograms of finite values, per block.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core.h"

namespace fakequant {

// The bin of x is floor(|x| / width), counted outwards from zero on the side of the sign of x. Values beyond the last
// bin are counted in the last bin. Runs on one thread: threads would share the counts of a block.
void histogram(const HistogramArgs& a) {
  const Shape& s = a.shape;
  const float* x = a.x;
  for (int64_t batch = 0; batch < s.batch; ++batch) {
    for (int64_t outer = 0; outer < s.outer; ++outer) {
      for (int64_t block = 0; block < s.blocks; ++block, x += s.inner) {
        const int64_t p = batch * s.blocks + block;
        const float inverse = a.inverse_width[p];
        int64_t* middle = a.counts + p * 2 * a.half + a.half;
        for (int64_t i = 0; i < s.inner; ++i) {
          const float magnitude = std::fabs(x[i]);
          if (!(magnitude <= std::numeric_limits<float>::max())) continue;  // not finite
          const float at = magnitude * inverse;  // may exceed the range of int64
          const int64_t bin = at >= 0 && at < float(a.half) ? std::min(int64_t(at), a.half - 1) : a.half - 1;
          ++middle[x[i] < 0 ? -1 - bin : bin];
        }
      }
    }
  }
}

}  // namespace fakequant
