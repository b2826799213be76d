#include <nanobind/nanobind.h>

#include "../../bindings/gil.hpp"
#include "../../bindings/loaded.hpp"
#include "../../exchange/bindings/module.hpp"
#include "../processor/thread_pool.hpp"
#include "../reduce/squared_norm.hpp"
#include "call_options.hpp"
#include "modules.hpp"

namespace nb = nanobind;
namespace ak = atoll_kernels;
using namespace nb::literals;

namespace {

double squared_norm(nb::handle object, int threads, bool portable) {
    const int checked = ak::checked_threads(threads);
    const ak::Buffer x = ak::load_buffer(object, "x", ak::cpu, ak::Access::read);
    const ak::GilReleased released(x.entries);
    return ak::squared_norm(x.data, x.entries, checked, ak::chosen_path(portable));
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
    ak::bind_sparse(m);
    ak::bind_units(m);
    ak::bind_exchange_engine(m);
    ak::bind_planning(m);
    m.def("cpu_features", cpu_features);
    m.def("stop_threads", stop_threads);
    nb::module_::import_("atexit").attr("register")(m.attr("stop_threads"));
}
