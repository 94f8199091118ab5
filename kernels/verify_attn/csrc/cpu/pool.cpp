#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace verify_attn {
namespace {

struct Pool {
  std::mutex caller; // held by the thread whose job runs
  std::mutex state;
  std::condition_variable wake, done;
  int workers = 0; // started so far
  uint64_t job = 0;
  int wanted = 0, running = 0;
  int64_t items = 0;
  std::atomic<int64_t> next{0};
  const std::function<void(int64_t, int)>* work = nullptr;

  void drain(int worker) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) (*work)(item, worker);
  }

  void serve(int worker, uint64_t seen) {
    std::unique_lock<std::mutex> lock(state);
    for (;;) {
      wake.wait(lock, [&] { return job != seen; });
      seen = job;
      if (worker > wanted) continue;
      lock.unlock();
      drain(worker);
      lock.lock();
      if (--running == 0) done.notify_one();
    }
  }

  // Starts threads up to `count`, as far as the system lets us; signals are left to the threads of the host program.
  void grow(int count) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    try {
      while (workers < count) {
        std::thread([this, id = workers + 1, seen = job] { serve(id, seen); }).detach();
        ++workers;
      }
    } catch (const std::system_error&) { // no more threads: go on with those there are
    }
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
  }

  void run(int threads, int64_t count, const std::function<void(int64_t, int)>& job_work) {
    {
      std::lock_guard<std::mutex> lock(state);
      grow(threads - 1);
      work = &job_work;
      items = count;
      next.store(0, std::memory_order_relaxed);
      wanted = running = workers < threads - 1 ? workers : threads - 1;
      ++job;
    }
    wake.notify_all();
    drain(0);
    std::unique_lock<std::mutex> lock(state);
    done.wait(lock, [&] { return running == 0; });
  }
};

// Never destroyed: detached threads may wait in it while the process ends.
std::atomic<Pool*> current{nullptr};

Pool* pool() {
  static const bool registered = [] {
    current = new Pool;
    pthread_atfork(nullptr, nullptr, [] { current = new Pool; }); // the child has none of the parent's threads
    return true;
  }();
  (void)registered;
  return current;
}

} // namespace

void parallel(int threads, int64_t items, const std::function<void(int64_t, int)>& work) {
  Pool* p = pool();
  std::unique_lock<std::mutex> mine(p->caller, std::defer_lock);
  if (threads <= 1 || items <= 1 || !mine.try_lock()) {
    for (int64_t item = 0; item < items; ++item) work(item, 0);
    return;
  }
  p->run((int)(items < threads ? items : threads), items, work);
}

int available_processors() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? (int)n : 1;
}

} // namespace verify_attn
