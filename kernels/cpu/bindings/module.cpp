#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../../bindings/gil.hpp"
#include "../../bindings/loaded.hpp"
#include "../../exchange/bindings/module.hpp"
#include "../../planning/bindings/module.hpp"
#include "../processor/thread_pool.hpp"
#include "../reduce/squared_norm.hpp"
#include "../reduce/weighted_sum.hpp"
#include "call_options.hpp"
#include "signs_module.hpp"
#include "sparse_module.hpp"
#include "units_module.hpp"

namespace nb = nanobind;
namespace ak = atoll_kernels;
using namespace nb::literals;

namespace atoll_kernels {
namespace {

// Everything one call of weighted_sum works on.
struct WeightedSumCall {
    Buffer out;
    std::vector<WeightedInput> inputs;

    WeightedSumCall(nb::handle out_object, nb::handle input_objects, nb::handle weights)
        : out(load_buffer(out_object, "out", cpu, Access::write)) {
        if (!PySequence_Check(input_objects.ptr()) || !PySequence_Check(weights.ptr()))
            throw nb::type_error("inputs and weights must be sequences; pass lists, of one entry if need be");
        const std::size_t count = nb::len(input_objects);
        if (count != nb::len(weights)) {
            throw nb::value_error((std::to_string(count) + " inputs but " + std::to_string(nb::len(weights)) +
                                   " weights; pass one weight for each input")
                                      .c_str());
        }
        if (count > max_inputs) {
            throw nb::value_error(("inputs has " + std::to_string(count) + " buffers; at most " +
                                   std::to_string(max_inputs) + " fit one call, so sum in several")
                                      .c_str());
        }
        buffers_.reserve(count);
        inputs.reserve(count);
        for (std::size_t k = 0; k < count; ++k) add(k, input_objects[k], weights[k]);
    }

  private:
    void add(std::size_t k, nb::object object, nb::object weight) {
        const std::string name = "inputs[" + std::to_string(k) + "]";
        const Buffer& x = buffers_.emplace_back(load_buffer(object, name, cpu, Access::read));
        if (x.entries != out.entries) {
            throw nb::value_error((name + " has " + std::to_string(x.entries) + " entries but out has " +
                                   std::to_string(out.entries) + "; they must be equally long")
                                      .c_str());
        }
        const auto from = reinterpret_cast<std::uintptr_t>(x.data);
        const auto to = reinterpret_cast<std::uintptr_t>(out.data);
        const std::uintptr_t distance = from > to ? from - to : to - from;
        if (distance != 0 && distance < out.entries * sizeof(float)) {
            throw nb::value_error(
                (name + " overlaps out by a part; pass out itself (in place) or separate memory").c_str());
        }
        double value = 0;
        if (!nb::try_cast(weight, value)) {
            throw nb::type_error(
                ("weights[" + std::to_string(k) + "] is a " + class_name(weight) + "; pass a float").c_str());
        }
        inputs.push_back({x.data, static_cast<float>(value)});
    }

    std::vector<Buffer> buffers_;
};

}  // namespace
}  // namespace atoll_kernels

namespace {

double squared_norm(nb::handle object, int threads, bool portable) {
    const int checked = ak::checked_threads(threads);
    const ak::Buffer x = ak::load_buffer(object, "x", ak::cpu, ak::Access::read);
    const ak::GilReleased released(x.entries);
    return ak::squared_norm(x.data, x.entries, checked, ak::chosen_path(portable));
}

void weighted_sum(nb::handle out, nb::handle inputs, nb::handle weights, int threads, bool portable) {
    const int checked = ak::checked_threads(threads);
    const ak::WeightedSumCall call(out, inputs, weights);
    const ak::GilReleased released(call.out.entries);
    ak::weighted_sum(call.out.data, call.out.entries, call.inputs.data(), call.inputs.size(), checked,
                     ak::chosen_path(portable));
}

void stop_threads() {
    const ak::GilReleased released(ak::chunk_entries);
    ak::stop_threads();
}

nb::dict cpu_features() {
    nb::dict features;
    features["path"] = ak::best_path() == ak::Path::avx2 ? "avx2" : "portable";
    features["threads"] = ak::default_threads();
    return features;
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // a daemon thread may hold an engine when the interpreter ends
    m.doc() = "Atoll's kernels on the CPU; atoll.kernels is the door to them.";
    m.def("squared_norm", squared_norm, "x"_a.none(), "threads"_a = 0, nb::kw_only(), "portable"_a = false);
    m.def("weighted_sum", weighted_sum, "out"_a.none(), "inputs"_a.none(), "weights"_a.none(), "threads"_a = 0,
          nb::kw_only(), "portable"_a = false);
    ak::bind_sparse(m);
    ak::bind_units(m);
    ak::bind_signs(m);
    ak::bind_exchange_engine(m);
    ak::bind_planning(m);
    m.def("cpu_features", cpu_features);
    m.def("stop_threads", stop_threads);
    nb::module_::import_("atexit").attr("register")(m.attr("stop_threads"));
}
