#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_pause.h"

namespace pool {
namespace {

using Clock = std::chrono::steady_clock;
using Duration = Clock::duration;

// Between the loops of a step threads spin this long; then they sleep, so that an idle server costs nothing and a
// core is lent to the server's other processes.
constexpr std::chrono::microseconds SPIN{30};

// Waits until done(): spinning first, then asleep. Whoever makes it true calls `wake` after.
class Gate {
  public:
    template <class Done>
    void wait(Done done) {
        auto end = Clock::now() + SPIN;
        do {
            for (int i = 0; i < 32; i++) {
                if (done()) return;
                cpu_pause();
            }
        } while (Clock::now() < end);
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);  // before the last look at done(), and wake() looks at it after done() was made true
        while (!done()) changed_.wait(lock);
        sleepers_.fetch_sub(1);
    }

    void wake() {
        if (sleepers_.load() == 0) return;
        std::lock_guard<std::mutex> lock(mutex_);
        changed_.notify_all();
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::atomic<int> sleepers_{0};
};

// Decides whether other threads help. A thread may be descheduled in the middle of a task when another process wants its
// core, and then all wait for it. If that costs more than the help saves, loops run on the caller alone for a while, and
// twice as long each time it happens again.
class Judgement {
  public:
    bool wants_help() {
        if (alone_ == 0) return true;
        alone_--;
        return false;
    }

    // After a loop with help: how long the caller worked on `own` of its tasks, and then waited for the others.
    void note(Duration worked, Duration waited, int64_t own, int64_t tasks) {
        if (own == 0) return;
        with_help_ += worked + waited, without_ += worked * tasks / own;
        if (++seen_ < WINDOW) return;
        if (with_help_ > without_)
            alone_ = next_, next_ = next_ < LONGEST ? 2 * next_ : LONGEST;
        else
            next_ = SHORTEST;
        with_help_ = without_ = {}, seen_ = 0;
    }

  private:
    static constexpr int WINDOW = 64, SHORTEST = 512, LONGEST = 8192;  // loops; a step has about a hundred
    Duration with_help_{}, without_{};
    int seen_ = 0, alone_ = 0, next_ = SHORTEST;
};

constexpr uint32_t CLOSED = UINT32_MAX;

// One loop at a time. `ticket_` is (number of the loop) << 32 | (next task): a thread takes a task by raising it, which
// fails when another loop has begun, so a late thread can never take a task of a loop whose body it has not read. While
// a loop's fields are written its ticket is CLOSED: whoever reads the number of its tasks sees that it was.
class Threads {
  public:
    ~Threads() { resize(1); }

    int count() const { return int(workers_.size()) + 1; }

    void resize(int threads) {
        std::lock_guard<std::mutex> lock(caller_);
        stopping_.store(true);
        posted_.wake();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        stopping_.store(false);
        try {
            for (int i = 1; i < threads; i++) workers_.emplace_back([this] { work(); });
        } catch (const std::system_error&) {
            // The system has no more: those there are do the work.
        }
    }

    void run(int64_t tasks, Body body, void* context) {
        std::unique_lock<std::mutex> lock(caller_, std::try_to_lock);
        bool possible = tasks > 1 && lock.owns_lock() && !workers_.empty() && tasks <= INT32_MAX;
        if (!possible || !judgement_.wants_help()) {
            for (int64_t task = 0; task < tasks; task++) body(context, task);
            return;
        }
        uint64_t loop = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store(loop << 32 | CLOSED);
        body_.store(body, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        tasks_.store(tasks, std::memory_order_release);
        done_.store(0, std::memory_order_relaxed);
        ticket_.store(loop << 32);
        auto begin = Clock::now();
        posted_.wake();
        int64_t own = take_tasks(uint32_t(loop));
        auto worked = Clock::now();
        finished_.wait([&] { return done_.load() == tasks; });
        judgement_.note(worked - begin, Clock::now() - worked, own, tasks);
        if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    }

  private:
    void work() {
        uint32_t seen = uint32_t(ticket_.load() >> 32);
        for (;;) {
            posted_.wait([&] { return stopping_.load() || is_open_after(seen); });
            if (stopping_.load()) return;
            seen = uint32_t(ticket_.load() >> 32);
            take_tasks(seen);
        }
    }

    bool is_open_after(uint32_t loop) const {
        uint64_t ticket = ticket_.load();
        return uint32_t(ticket >> 32) != loop && uint32_t(ticket) != CLOSED;
    }

    // Returns how many it took.
    int64_t take_tasks(uint32_t loop) {
        for (int64_t taken = 0;;) {
            uint64_t ticket = ticket_.load();
            int64_t tasks = tasks_.load(std::memory_order_acquire), task = uint32_t(ticket);
            Body body = body_.load(std::memory_order_relaxed);
            void* context = context_.load(std::memory_order_relaxed);
            if (uint32_t(ticket >> 32) != loop || task >= tasks) return taken;
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
            taken++;
            try {
                body(context, task);
            } catch (...) {  // the others still use what the caller would leave
                std::lock_guard<std::mutex> lock(failing_);
                if (!failure_) failure_ = std::current_exception();
            }
            if (done_.fetch_add(1) + 1 == tasks) finished_.wake();
        }
    }

    std::mutex caller_, failing_;
    std::exception_ptr failure_;  // of the loop that runs; the caller's once all tasks are done
    std::vector<std::thread> workers_;
    Gate posted_, finished_;
    Judgement judgement_;
    std::atomic<bool> stopping_{false};
    std::atomic<uint64_t> ticket_{0};
    std::atomic<int64_t> tasks_{0}, done_{0};
    std::atomic<Body> body_{nullptr};
    std::atomic<void*> context_{nullptr};
};

// Never destroyed: at the end of a process its threads may be gone already.
Threads& shared() {
    alignas(Threads) static char memory[sizeof(Threads)];
    static Threads* threads = new (memory) Threads;
    return *threads;
}

}  // namespace

void set_threads(int threads) { shared().resize(threads < 1 ? 1 : threads); }
int threads() { return shared().count(); }
void run_tasks(int64_t tasks, Body body, void* context) { shared().run(tasks, body, context); }

}  // namespace pool
