#include "torch/reused_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "torch/functions.h"
#include "torch/plain_tensors.h"

namespace fakequant::autograd {
namespace {

using at::Tensor;

// The C library reuses smaller blocks itself.
constexpr size_t kSmallestBlock = size_t(1) << 20;
constexpr size_t kLargestBlock = size_t(1) << 25;
// What is kept for reuse in total, whether it is in use or not.
constexpr size_t kPooledBytes = size_t(1) << 26;

struct PooledBlock {
  c10::Storage storage;
  const void* data;
  c10::DeleterFnPtr deleter;

  explicit PooledBlock(c10::Storage s)
      : storage(std::move(s)), data(storage.data()), deleter(storage.data_ptr().get_deleter()) {}

  bool is_idle() const { return storage.use_count() == 1; }
  // False if it was resized, moved to shared memory, or shares its data with a storage that copies when written.
  bool is_own(size_t bytes) const {
    return storage.nbytes() == bytes && storage.data() == data && storage.data_ptr().get_deleter() == deleter;
  }
};

class Pool {
 public:
  std::optional<c10::Storage> take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    for (size_t i = blocks_.size(); i-- > 0;) {
      if (!blocks_[i].is_idle() || blocks_[i].storage.nbytes() != bytes) continue;
      PooledBlock found = std::move(blocks_[i]);
      blocks_.erase(blocks_.begin() + std::ptrdiff_t(i));
      if (!found.is_own(bytes)) continue;
      blocks_.push_back(found);  // the last is the one used last
      return found.storage;
    }
    return std::nullopt;
  }

  void keep(const c10::Storage& storage) {
    const std::lock_guard lock(mutex_);
    size_t total = storage.nbytes();
    for (const PooledBlock& block : blocks_) total += block.storage.nbytes();
    for (size_t i = 0; i < blocks_.size() && total > kPooledBytes;) {
      if (!blocks_[i].is_idle()) { ++i; continue; }
      total -= blocks_[i].storage.nbytes();
      blocks_.erase(blocks_.begin() + std::ptrdiff_t(i));
    }
    if (total <= kPooledBytes) blocks_.emplace_back(storage);
  }

  void release() {
    const std::lock_guard lock(mutex_);
    std::erase_if(blocks_, [](const PooledBlock& block) { return block.is_idle(); });
  }

 private:
  std::mutex mutex_;
  std::vector<PooledBlock> blocks_;
};

// Never destroyed, because tensors may outlive it.
Pool& memory_pool() {
  static auto* found = new Pool;
  return *found;
}

// Gives `t`, which has no memory yet, memory of its size.
Tensor with_memory(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, size_t bytes) {
  auto storage = memory_pool().take(bytes);
  if (!storage) {
    storage = at::empty({int64_t(bytes)}, at::kByte).storage();
    memory_pool().keep(*storage);
  }
  Tensor t = at::detail::make_tensor<c10::TensorImpl>(
      std::move(*storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return t;
}

}  // namespace

Tensor reusable_empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  const size_t bytes = size_t(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  if (bytes < kSmallestBlock || bytes > kLargestBlock) return at::empty(sizes, dtype);
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= std::max<int64_t>(sizes[i], 1)) strides[i] = step;
  return with_memory(sizes, strides, dtype, bytes);
}

Tensor reusable_empty_like(const Tensor& x, at::ScalarType dtype) {
  const size_t bytes = size_t(x.numel()) * c10::elementSize(dtype);
  if (bytes < kSmallestBlock || bytes > kLargestBlock || !x.is_non_overlapping_and_dense())
    return at::empty_like(x, x.options().dtype(dtype));
  return with_memory(x.sizes(), x.strides(), dtype, bytes);
}

nb::object empty_floats(const std::vector<int64_t>& sizes) { return wrap(reusable_empty(sizes, at::kFloat)); }

void release_memory() {
  memory_pool().release();
#ifdef __GLIBC__
  malloc_trim(0);  // blocks that were freed between others in use stay with the process otherwise
#endif
}

}  // namespace fakequant::autograd
