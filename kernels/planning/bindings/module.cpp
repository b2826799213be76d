#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <utility>

#include "../../cpu/bindings/modules.hpp"
#include "../fusion.hpp"
#include "../search.hpp"
#include "../timeline.hpp"

namespace nb = nanobind;

namespace atoll_kernels {
namespace {

using namespace nb::literals;
using Pairs = std::vector<std::tuple<double, double>>;
using Chains = std::vector<std::vector<std::tuple<std::size_t, double, double, double>>>;

std::vector<TensorWork> loaded_tensors(const Pairs& pairs) {
    std::vector<TensorWork> tensors;
    for (const auto& [bytes, backward_s] : pairs) tensors.push_back({bytes, backward_s});
    return tensors;
}

Timeline loaded_timeline(const Pairs& tensors, const Chains& chains, std::size_t resources) {
    if (chains.empty() || chains.size() > UINT16_MAX) throw std::invalid_argument("1 to 65535 options are possible");
    std::vector<std::vector<Task>> options;
    for (const auto& chain : chains) {
        std::vector<Task>& tasks = options.emplace_back();
        for (const auto& [resource, alpha, beta, factor] : chain) {
            if (resource >= resources) throw std::invalid_argument("a task's resource is none of those there are");
            tasks.push_back({resource, alpha, beta, factor});
        }
    }
    return {loaded_tensors(tensors), std::move(options), resources};
}

void require(const Timeline& timeline, const Choice& choice) {
    if (choice.size() != timeline.tensors()) throw std::invalid_argument("choice must name an option for each tensor");
    for (const std::uint16_t option : choice) {
        if (option >= timeline.options()) throw std::invalid_argument("choice names an option that there is not");
    }
}

double end_s(Timeline& timeline, const Choice& choice) {
    require(timeline, choice);
    return timeline.end_s(choice);
}

auto searched(Timeline& timeline, std::uint64_t tasks) {
    const nb::gil_scoped_release released;
    Searched found = search(timeline, tasks);
    return std::tuple(std::move(found.choice), found.end_s);
}

auto fused(const Pairs& tensors, std::tuple<double, double, double> compress,
           std::tuple<double, double> communicate) {
    const auto [alpha, beta, floor_bytes] = compress;
    const Cost encoding{alpha, beta, floor_bytes}, sending{std::get<0>(communicate), std::get<1>(communicate), 0};
    Fused found = fuse(loaded_tensors(tensors), encoding, sending);
    return std::tuple(std::move(found.ends), found.end_s);
}

}  // namespace

void bind_planning(nb::module_& m) {
    nb::class_<Timeline>(m, "Timeline")
        .def("__init__",
             [](Timeline* self, const Pairs& tensors, const Chains& options, std::size_t resources) {
                 new (self) Timeline(loaded_timeline(tensors, options, resources));
             },
             "tensors"_a, "options"_a, "resources"_a)
        .def("end_s", end_s, "choice"_a)
        .def("search", searched, "tasks"_a);
    m.def("fuse", fused, "tensors"_a, "compress"_a, "communicate"_a);
}

}  // namespace atoll_kernels
