// The threads of one block as fibers of one processor thread. A context is made once for each thread of a block; from
// then on fibers are changed by jumps, since swapcontext asks the kernel for its signal mask each time.
#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <cstdio>
#include <memory>
#include <vector>

#include "cuda_runtime.h"

namespace cuda_on_cpu {
namespace {

constexpr std::size_t stack_bytes = std::size_t{1} << 16;
constexpr unsigned warp_lanes = 32;

enum class Fate { ready, at_block, at_warp, ended };

struct Fiber {
    ucontext_t context;
    jmp_buf at;
    std::unique_ptr<char[]> stack{new char[stack_bytes]};
    Fate fate = Fate::ready;
    bool started = false;
};

std::vector<Fiber> fibers;
std::vector<std::array<unsigned char, warp_lanes * 8>> slots;
ucontext_t before_first;
jmp_buf scheduler;
const std::function<void()>* body = nullptr;
unsigned running = 0;
unsigned turns = 0;

void start() {
    (*body)();
    fibers[running].fate = Fate::ended;
    _longjmp(scheduler, 1);
}

void go_on(Fiber& fiber) {
    if (_setjmp(scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    swapcontext(&before_first, &fiber.context);
}

void wait(Fate fate) {
    const unsigned me = running;
    fibers[me].fate = fate;
    if (_setjmp(fibers[me].at) == 0) _longjmp(scheduler, 1);
}

bool all_have(unsigned begin, unsigned end, Fate fate) {
    for (unsigned f = begin; f < end; ++f) {
        if (fibers[f].fate != fate) return false;
    }
    return true;
}

// Whether anyone can go on.
bool release(unsigned threads) {
    bool any = false;
    const auto free = [&](unsigned begin, unsigned end) {
        for (unsigned f = begin; f < end; ++f) fibers[f].fate = Fate::ready;
        any = true;
    };
    if (all_have(0, threads, Fate::at_block)) free(0, threads);
    for (unsigned begin = 0; begin < threads; begin += warp_lanes) {
        const unsigned end = std::min(begin + warp_lanes, threads);
        if (all_have(begin, end, Fate::at_warp)) free(begin, end);
    }
    return any;
}

}  // namespace

void run_block(unsigned threads, const std::function<void()>& thread) {
    if (fibers.size() < threads) fibers = std::vector<Fiber>(threads);
    slots.resize((threads + warp_lanes - 1) / warp_lanes);
    body = &thread;
    for (unsigned f = 0; f < threads; ++f) {
        getcontext(&fibers[f].context);
        fibers[f].context.uc_stack = {fibers[f].stack.get(), 0, stack_bytes};
        fibers[f].context.uc_link = nullptr;
        fibers[f].fate = Fate::ready;
        fibers[f].started = false;
        makecontext(&fibers[f].context, start, 0);
    }
    do {
        const bool from_last = backwards();
        for (unsigned turn = 0; turn < threads; ++turn) {
            running = from_last ? threads - 1 - turn : turn;
            if (fibers[running].fate != Fate::ready) continue;
            threadIdx.x = running;
            go_on(fibers[running]);
        }
    } while (release(threads));
    if (all_have(0, threads, Fate::ended)) return;
    std::fputs("a barrier or an exchange was not reached by all threads\n", stderr);
    std::abort();
}

void meet_block() { wait(Fate::at_block); }
void meet_warp() { wait(Fate::at_warp); }
void* warp_slots() { return slots[threadIdx.x / warp_lanes].data(); }
bool backwards() { return std::popcount(++turns * 0x9e3779b9U) % 2 == 0; }

}  // namespace cuda_on_cpu
