#include "search.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <utility>

namespace atoll_kernels {
namespace {

class Search {
  public:
    Search(Timeline& timeline, std::uint64_t tasks)
        : timeline_(timeline), last_(timeline.tasks_served() + tasks), order_(timeline.tensors()) {
        std::iota(order_.begin(), order_.end(), std::size_t{0});
        const std::vector<TensorWork>& work = timeline.work();
        std::stable_sort(order_.begin(), order_.end(), [&](auto a, auto b) { return work[a].bytes > work[b].bytes; });
    }

    Searched run() {
        if (few()) return every();
        starts();
        std::stable_sort(starts_.begin(), starts_.end(), [](const auto& a, const auto& b) { return a.end_s < b.end_s; });
        Searched best = starts_.front();
        for (Searched& start : starts_) {
            if (spent()) break;
            descend(start);
            if (start.end_s < best.end_s) best = std::move(start);
        }
        while (!spent()) {
            Searched shaken = shake(best);
            descend(shaken);
            if (shaken.end_s < best.end_s) best = std::move(shaken);
        }
        return best;
    }

  private:
    static constexpr std::size_t shaken_tensors = 3;
    static constexpr std::size_t most_sizes = 12;
    static constexpr std::size_t most_starts = 4;

    bool spent() const { return timeline_.tasks_served() >= last_; }

    // Whether all choices can be tried.
    bool few() {
        std::uint64_t choices = 1;
        const std::uint64_t before = timeline_.tasks_served();
        timeline_.end_s(Choice(timeline_.tensors(), 0));
        const std::uint64_t most = (last_ - before) / std::max<std::uint64_t>(timeline_.tasks_served() - before, 1) / 2;
        for (std::size_t i = 0; i < timeline_.tensors() && choices <= most; ++i) choices *= timeline_.options();
        return choices <= most;
    }

    Searched every() {
        Choice choice(timeline_.tensors(), 0);
        Searched best{choice, timeline_.end_s(choice)};
        for (;;) {
            std::size_t place = 0;
            while (place < choice.size() && ++choice[place] == timeline_.options()) choice[place++] = 0;
            if (place == choice.size()) return best;
            const double end_s = timeline_.end_s(choice, best.end_s);
            if (end_s < best.end_s) best = {choice, end_s};
        }
    }

    // One option for all, then two by size; the few best are kept.
    void starts() {
        for (std::size_t option = 0; option < timeline_.options(); ++option) {
            Choice choice(timeline_.tensors(), static_cast<std::uint16_t>(option));
            const double end_s = timeline_.end_s(choice);
            starts_.push_back({std::move(choice), end_s});
        }
        std::vector<std::size_t> cuts;  // the places in order_ where another size begins
        for (std::size_t i = 1; i < order_.size(); ++i) {
            if (timeline_.work()[order_[i]].bytes < timeline_.work()[order_[i - 1]].bytes) cuts.push_back(i);
        }
        const std::size_t step = cuts.size() / most_sizes + 1;
        Searched best = *std::min_element(starts_.begin(), starts_.end(),
                                          [](const auto& a, const auto& b) { return a.end_s < b.end_s; });
        const std::size_t uniform = starts_.size();
        for (std::size_t large = 0; large < uniform; ++large) {
            for (std::size_t small = 0; small < uniform; ++small) {
                if (large != small) by_size(cuts, step, large, small, best);
            }
        }
        std::stable_sort(starts_.begin(), starts_.end(), [](const auto& a, const auto& b) { return a.end_s < b.end_s; });
        if (starts_.size() > most_starts) starts_.resize(most_starts);
        if (best.end_s < starts_.front().end_s) starts_.push_back(std::move(best));
    }

    void by_size(const std::vector<std::size_t>& cuts, std::size_t step, std::size_t large, std::size_t small,
                 Searched& best) {
        for (std::size_t i = 0; i < cuts.size(); i += step) {
            Choice choice(timeline_.tensors(), static_cast<std::uint16_t>(small));
            for (std::size_t place = 0; place < cuts[i]; ++place) {
                choice[order_[place]] = static_cast<std::uint16_t>(large);
            }
            const double end_s = timeline_.end_s(choice, best.end_s);
            if (end_s < best.end_s) best = {std::move(choice), end_s};
        }
    }

    // The same with other options for a few tensors: a descent from there may end lower.
    Searched shake(const Searched& from) {
        Searched at = from;
        for (std::size_t i = 0; i < shaken_tensors; ++i) {
            at.choice[random_() % timeline_.tensors()] = static_cast<std::uint16_t>(random_() % timeline_.options());
        }
        at.end_s = timeline_.end_s(at.choice);
        return at;
    }

    void descend(Searched& at) {
        while (!spent() && (each_tensor(at) || each_group(at) || each_pair(at))) {
        }
    }

    bool each_tensor(Searched& at) {
        bool improved = false;
        for (const std::size_t tensor : order_) {
            if (spent()) return improved;
            improved |= try_options(at, {tensor});
        }
        return improved;
    }

    // The first u of those with one size and option, those farthest from the output first.
    bool each_group(Searched& at) {
        std::map<std::pair<double, std::uint16_t>, std::vector<std::size_t>> groups;
        for (std::size_t tensor = timeline_.tensors(); tensor-- > 0;) {
            groups[{-timeline_.work()[tensor].bytes, at.choice[tensor]}].push_back(tensor);
        }
        bool improved = false;
        for (const auto& [key, members] : groups) {
            std::vector<std::size_t> first;
            for (const std::size_t tensor : members) {
                first.push_back(tensor);
                if (spent()) return improved;
                if (first.size() > 1) improved |= try_options(at, first);
            }
        }
        return improved;
    }

    // Two tensors at once, where there are few.
    bool each_pair(Searched& at) {
        for (std::size_t a = 0; a + 1 < order_.size(); ++a) {
            const std::uint16_t before = at.choice[order_[a]];
            for (std::uint16_t option = 0; option < timeline_.options(); ++option) {
                if (option == before) continue;
                Searched moved{at.choice, at.end_s};
                moved.choice[order_[a]] = option;
                for (std::size_t b = a + 1; b < order_.size(); ++b) {
                    if (spent()) return false;
                    if (try_options(moved, {order_[b]})) {
                        at = std::move(moved);
                        return true;
                    }
                }
            }
        }
        return false;
    }

    // Another option for these tensors together, where that is sooner.
    bool try_options(Searched& at, const std::vector<std::size_t>& tensors) {
        Choice choice = at.choice;
        bool improved = false;
        for (std::uint16_t option = 0; option < timeline_.options(); ++option) {
            if (option == at.choice[tensors.front()]) continue;
            for (const std::size_t tensor : tensors) choice[tensor] = option;
            const double end_s = timeline_.end_s(choice, at.end_s);
            if (end_s < at.end_s) {
                at = {choice, end_s};
                improved = true;
            }
        }
        return improved;
    }

    Timeline& timeline_;
    std::uint64_t last_;
    std::vector<std::size_t> order_;  // of tensors, the largest first, then those nearest the output
    std::vector<Searched> starts_;
    std::mt19937_64 random_{1};  // the same everywhere
};

}  // namespace

Searched search(Timeline& timeline, std::uint64_t tasks) { return Search(timeline, tasks).run(); }

}  // namespace atoll_kernels
