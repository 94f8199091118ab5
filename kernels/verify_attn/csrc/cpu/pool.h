// A small thread pool. Own threads instead of OpenMP: torch brings an OpenMP runtime of its own, and two of them in one
// process fight over the cores. After a fork the child starts with a fresh pool.
#pragma once
#include <stdint.h>

#include <functional>

namespace verify_attn {

// Calls work(item, worker) for every item in 0 .. items, on up to `threads` threads, the caller being worker 0; returns
// when all are done. Items are taken in order. When another thread is using the pool, the caller does all of it alone.
void parallel(int threads, int64_t items, const std::function<void(int64_t item, int worker)>& work);

// Processors this process may run on.
int available_processors();

} // namespace verify_attn
