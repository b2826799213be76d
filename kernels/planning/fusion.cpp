#include "fusion.hpp"

#include <algorithm>

namespace atoll_kernels {
namespace {

struct Label {
    double computed_s, sent_s;
    std::size_t prefix, label;  // that it extends
};

class Fusion {
  public:
    Fusion(const std::vector<TensorWork>& tensors, const Cost& compress, const Cost& communicate)
        : tensors_(tensors), compress_(compress), communicate_(communicate), rest_(tensors.size() + 1) {
        for (std::size_t i = tensors.size(); i-- > 0;) {
            rest_[i] = {rest_[i + 1].bytes + tensors[i].bytes, rest_[i + 1].backward_s + tensors[i].backward_s};
        }
    }

    // A first search keeps only the most promising labels. Its result bounds the search among all.
    Fused run() {
        limit_s_ = extended(narrow).end_s * (1 + 1e-9);  // a grouping that ends at the limit is still found
        return extended(Timeline::never);
    }

  private:
    static constexpr double narrow = 2;  // labels of a prefix in the first search

    Fused extended(double most_labels) {
        prefixes_.assign(tensors_.size() + 1, {});
        prefixes_[0].push_back({0, 0, 0, 0});
        for (std::size_t end = 1; end <= tensors_.size(); ++end) {
            extend_to(end);
            while (static_cast<double>(prefixes_[end].size()) > most_labels) drop_worst(end);
        }
        return followed_back();
    }

    void drop_worst(std::size_t end) {
        const auto later = [&](const Label& a, const Label& b) { return ends_s(end, a) < ends_s(end, b); };
        prefixes_[end].erase(std::max_element(prefixes_[end].begin(), prefixes_[end].end(), later));
    }

    // Returns a lower bound of the end of all that extends the label.
    double ends_s(std::size_t end, const Label& label) const {
        if (end == tensors_.size()) return label.sent_s;
        return std::max(label.computed_s + at_least_s(end), label.sent_s + communicate_(rest_[end].bytes));
    }

    void extend_to(std::size_t end) {
        // The next group computes for this long at least. Until then it does not matter whether the link is free.
        const bool is_last = end == tensors_.size();
        const double next_s = is_last ? 0 : tensors_[end].backward_s + compress_(tensors_[end].bytes);
        double bytes = 0, backward_s = 0;
        for (std::size_t begin = end; begin-- > 0;) {
            bytes += tensors_[begin].bytes;
            backward_s += tensors_[begin].backward_s;
            const double compute_s = backward_s + compress_(bytes), send_s = communicate_(bytes);
            for (std::size_t i = 0; i < prefixes_[begin].size(); ++i) {
                const Label& label = prefixes_[begin][i];
                const double computed_s = label.computed_s + compute_s;
                const double sent_s = std::max(computed_s, label.sent_s) + send_s;
                if (computed_s + at_least_s(end) > limit_s_) break;  // later ones computed for longer
                if (!is_last && sent_s + communicate_(rest_[end].bytes) > limit_s_) continue;
                add(prefixes_[end], {computed_s, std::max(sent_s, computed_s + next_s), begin, i});
            }
        }
    }

    // Returns the least seconds after the end of computing: the rest as one group computes least.
    double at_least_s(std::size_t end) const {
        if (end == tensors_.size()) return 0;
        return rest_[end].backward_s + compress_(rest_[end].bytes) + communicate_(0);
    }

    // Adds a label unless another equals or beats it in both; removes those that it beats. Sorted by computed_s.
    static void add(std::vector<Label>& labels, const Label& label) {
        const auto after = std::upper_bound(labels.begin(), labels.end(), label, [](const Label& a, const Label& b) {
            return a.computed_s < b.computed_s;
        });
        if (after != labels.begin() && std::prev(after)->sent_s <= label.sent_s) return;
        auto first = after;
        if (first != labels.begin() && std::prev(first)->computed_s == label.computed_s) --first;
        auto last = after;
        while (last != labels.end() && last->sent_s >= label.sent_s) ++last;
        if (first == last) {
            labels.insert(first, label);
        } else {
            *first = label;
            labels.erase(first + 1, last);
        }
    }

    Fused followed_back() const {
        std::size_t prefix = tensors_.size(), label = prefixes_[prefix].size() - 1;  // the last one ends first
        Fused found{{}, prefixes_[prefix][label].sent_s};
        while (prefix > 0) {
            found.ends.push_back(prefix);
            const Label& at = prefixes_[prefix][label];
            prefix = at.prefix;
            label = at.label;
        }
        std::reverse(found.ends.begin(), found.ends.end());
        return found;
    }

    const std::vector<TensorWork>& tensors_;
    const Cost &compress_, &communicate_;
    std::vector<TensorWork> rest_;  // of tensor i and all after it
    double limit_s_ = Timeline::never;  // some grouping ends by then
    std::vector<std::vector<Label>> prefixes_;
};

}  // namespace

Fused fuse(const std::vector<TensorWork>& tensors, const Cost& compress, const Cost& communicate) {
    return Fusion(tensors, compress, communicate).run();
}

}  // namespace atoll_kernels
