#include "search.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

namespace atoll_kernels {
namespace {

bool ends_sooner(const Searched& a, const Searched& b) { return a.end_s < b.end_s; }

class Search {
  public:
    Search(Timeline& timeline, std::uint64_t tasks)
        : timeline_(timeline), last_(timeline.tasks_served() + tasks), order_(timeline.tensors()) {
        std::iota(order_.begin(), order_.end(), std::size_t{0});
        const std::vector<TensorWork>& work = timeline.work();
        std::stable_sort(order_.begin(), order_.end(), [&](auto a, auto b) { return work[a].bytes > work[b].bytes; });
    }

    Searched run() {
        if (can_try_all()) return best_of_all();
        const std::vector<Searched> starts = find_starts();
        Searched best = starts.front();
        for (const Searched& start : starts) keep_better(best, descend(start));
        while (!spent()) keep_better(best, descend(shake(best)));
        return best;
    }

  private:
    static constexpr std::size_t shaken_tensors = 6;   // that get a random option before a descent
    static constexpr std::size_t max_thresholds = 12;  // sizes at which two options are cut apart
    static constexpr std::size_t max_starts = 4;       // uniform choices to descend from

    bool spent() const { return timeline_.tasks_served() >= last_; }

    bool can_try_all() {
        const std::uint64_t before = timeline_.tasks_served();
        timeline_.end_s(Choice(timeline_.tensors(), 0));
        const std::uint64_t most = (last_ - before) / std::max<std::uint64_t>(timeline_.tasks_served() - before, 1) / 2;
        std::uint64_t choices = 1;
        for (std::size_t i = 0; i < timeline_.tensors() && choices <= most; ++i) choices *= timeline_.options();
        return choices <= most;
    }

    Searched best_of_all() {
        Choice choice(timeline_.tensors(), 0);
        Searched best{choice, timeline_.end_s(choice)};
        for (;;) {
            std::size_t place = 0;
            while (place < choice.size() && ++choice[place] == timeline_.options()) choice[place++] = 0;
            if (place == choice.size()) return best;
            try_choice(choice, best);
        }
    }

    // The best uniform choices, and the best with one option from a size on and another below; the soonest first.
    std::vector<Searched> find_starts() {
        std::vector<Searched> starts;
        for (std::size_t option = 0; option < timeline_.options(); ++option) {
            Choice choice(timeline_.tensors(), static_cast<std::uint16_t>(option));
            const double end_s = timeline_.end_s(choice);
            starts.push_back({std::move(choice), end_s});
        }
        std::stable_sort(starts.begin(), starts.end(), ends_sooner);
        const Searched by_size = best_by_size(starts.front());
        starts.resize(std::min(starts.size(), max_starts));
        if (by_size.end_s < starts.front().end_s) starts.insert(starts.begin(), by_size);
        return starts;
    }

    Searched best_by_size(Searched best) {
        std::vector<std::size_t> cuts;  // the places in order_ where another size begins
        for (std::size_t i = 1; i < order_.size(); ++i) {
            if (timeline_.work()[order_[i]].bytes < timeline_.work()[order_[i - 1]].bytes) cuts.push_back(i);
        }
        const std::size_t step = cuts.size() / max_thresholds + 1;
        for (std::size_t large = 0; large < timeline_.options(); ++large) {
            for (std::size_t small = 0; small < timeline_.options(); ++small) {
                for (std::size_t i = 0; i < cuts.size() && large != small; i += step) {
                    Choice choice(timeline_.tensors(), static_cast<std::uint16_t>(small));
                    for (std::size_t k = 0; k < cuts[i]; ++k) choice[order_[k]] = static_cast<std::uint16_t>(large);
                    try_choice(choice, best);
                }
            }
        }
        return best;
    }

    Searched shake(Searched at) {
        for (std::size_t i = 0; i < shaken_tensors; ++i) {
            at.choice[random_() % timeline_.tensors()] = static_cast<std::uint16_t>(random_() % timeline_.options());
        }
        at.end_s = timeline_.end_s(at.choice);
        return at;
    }

    // Changes one tensor at a time, the largest first, until no change of one tensor ends sooner.
    Searched descend(Searched at) {
        for (bool improved = true; improved;) {
            improved = false;
            for (const std::size_t tensor : order_) {
                if (spent()) return at;
                improved |= try_options(at, tensor);
            }
        }
        return at;
    }

    bool try_options(Searched& at, std::size_t tensor) {
        const std::uint16_t before = at.choice[tensor];
        Choice choice = at.choice;
        for (std::uint16_t option = 0; option < timeline_.options(); ++option) {
            choice[tensor] = option;
            if (option != at.choice[tensor]) try_choice(choice, at);
        }
        return at.choice[tensor] != before;
    }

    void try_choice(const Choice& choice, Searched& best) {
        const double end_s = timeline_.end_s(choice, best.end_s);
        if (end_s < best.end_s) best = {choice, end_s};
    }

    static void keep_better(Searched& best, Searched found) {
        if (found.end_s < best.end_s) best = std::move(found);
    }

    Timeline& timeline_;
    std::uint64_t last_;
    std::vector<std::size_t> order_;  // of tensors: the largest first, then those nearest the output
    std::mt19937_64 random_{1};       // a fixed seed: the same answer on every machine
};

}  // namespace

Searched search(Timeline& timeline, std::uint64_t tasks) { return Search(timeline, tasks).run(); }

}  // namespace atoll_kernels
