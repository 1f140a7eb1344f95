#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace fakequant {
namespace {

constexpr int kMaxThreads = 64;

// One call of run_tasks. It lives on the caller's stack, so a worker accesses it only while it is counted in `workers`,
// which is changed under the pool's mutex.
struct Job {
  void (*body)(void*, int64_t);
  void* context;
  int64_t tasks;
  int shares;           // number of contiguous shares the tasks are divided into
  int next_share = 1;   // share 0 belongs to the caller
  int workers = 0;
  std::condition_variable done{};

  struct alignas(64) Cursor { std::atomic<int64_t> next{0}; };  // one cache line each
  Cursor cursor[kMaxThreads]{};

  int64_t share_begin(int s) const { return tasks * s / shares; }

  // Runs the tasks of share `own` first, so that a thread's tasks are adjacent in memory, then takes tasks from the
  // other shares.
  void work(int own) {
    for (int i = 0; i < shares; ++i) {
      const int s = (own + i) % shares;
      const int64_t begin = share_begin(s), end = share_begin(s + 1);
      for (;;) {
        const int64_t task = begin + cursor[s].next.fetch_add(1, std::memory_order_relaxed);
        if (task >= end) break;
        body(context, task);
      }
    }
  }
};

struct Pool {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<Job*> jobs;  // those that have shares left to hand out
  int threads = 0;

  void ensure_threads(int n) {
    for (; threads < n; ++threads) {
      try {
        std::thread([this] { worker(); }).detach();
      } catch (const std::system_error&) {
        return;  // the system has no more threads: the existing ones and the caller do the work
      }
    }
  }

  void worker() {
    std::unique_lock lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return !jobs.empty(); });
      Job* job = jobs.front();
      const int share = job->next_share++;
      if (job->next_share >= job->shares) jobs.pop_front();
      ++job->workers;
      lock.unlock();
      job->work(share);
      lock.lock();
      if (--job->workers == 0) job->done.notify_one();
    }
  }

  void run(Job& job) {
    {
      std::lock_guard lock(mutex);
      ensure_threads(job.shares - 1);
      jobs.push_back(&job);
    }
    if (job.shares == 2) wake.notify_one();
    else wake.notify_all();
    job.work(0);
    std::unique_lock lock(mutex);
    jobs.erase(std::remove(jobs.begin(), jobs.end(), &job), jobs.end());
    job.done.wait(lock, [&] { return job.workers == 0; });
  }
};

std::atomic<const Borrowed*> g_lent{nullptr};
thread_local bool t_borrows = false;

// Never destroyed, because its threads may be waiting on it while the process exits.
Pool* g_pool = nullptr;
std::once_flag g_pool_once;

#if !defined(_WIN32)
// A forked child has none of the parent's threads, and its copy of the mutex may be locked by one of them. The pool is
// therefore replaced and the old one leaked. Lent threads do not exist in the child either, and OpenMP would wait for
// them forever.
void forget_threads_in_child() {
  g_pool = new Pool;
  g_lent.store(nullptr, std::memory_order_relaxed);
}
#endif

Pool& pool() {
  std::call_once(g_pool_once, [] {
    g_pool = new Pool;
#if !defined(_WIN32)
    pthread_atfork(nullptr, nullptr, forget_threads_in_child);
#endif
  });
  return *g_pool;
}

int default_threads() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::clamp(CPU_COUNT(&set), 1, kMaxThreads);
#endif
  return std::clamp(int(std::thread::hardware_concurrency()), 1, kMaxThreads);
}

std::atomic<int> g_num_threads{0};

}  // namespace

int get_num_threads() {
  int n = g_num_threads.load(std::memory_order_relaxed);
  if (n == 0) {
    n = default_threads();
    g_num_threads.store(n, std::memory_order_relaxed);
  }
  return n;
}

void set_num_threads(int n) { g_num_threads.store(std::clamp(n, 1, kMaxThreads), std::memory_order_relaxed); }

void lend_threads(const Borrowed& from) {
  pool();  // registers the fork handler
  g_lent.store(new Borrowed(from), std::memory_order_release);  // the previous one is leaked: calls may be using it
}

BorrowThreads::BorrowThreads(bool yes) : before_(t_borrows) { t_borrows = yes; }
BorrowThreads::~BorrowThreads() { t_borrows = before_; }

void run_tasks(int64_t tasks, void (*body)(void*, int64_t), void* context) {
  const Borrowed* borrowed = t_borrows && tasks > 1 ? g_lent.load(std::memory_order_acquire) : nullptr;
  int threads = get_num_threads();
  if (uint32_t n; borrowed && borrowed->num_threads(&n) == 0) threads = std::min(threads, int(n));
  const int shares = int(std::min<int64_t>(tasks, threads));
  if (shares <= 1) {
    for (int64_t task = 0; task < tasks; ++task) body(context, task);
    return;
  }
  Job job{.body = body, .context = context, .tasks = tasks, .shares = shares};
  if (borrowed) {
    const auto work = [](int64_t begin, int64_t end, void* job) {
      for (int64_t share = begin; share < end; ++share) static_cast<Job*>(job)->work(int(share));
    };
    if (borrowed->parallel_for(0, shares, 1, work, &job) == 0) return;
    // On failure the pool does the remaining tasks; the cursors tell which.
  }
  pool().run(job);
}

}  // namespace fakequant
